"""Rows of several widths at equal bytes: the bytes are those of the arrays, and the readings are of those rows."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.evaluation.equal_bytes import WIDTHS, EqualBytesReading, by_share, read_at_equal_bytes
from velox_cache.harness.reading import read_passage
from velox_cache.installation.installing import install, uninstall

PASSAGE = [(7 * i * i + 3 * i) % 97 for i in range(96)]


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    made = tiny_model(head_dim=64)
    made.set_dtype(mx.float16)
    return made


def test_rows_of_every_width_take_the_same_bytes(model: nn.Module) -> None:
    found = read_at_equal_bytes(
        model, [PASSAGE], "l2norm", n_context=84, shares=(1 / 4,), group_size=32, dtype=mx.float16
    )
    numbers, scales = 2 * 2 * 64, 2 * 2 * 2  # of a token's keys, and of its values: layers, heads, numbers and groups
    expected = {
        "as they came": numbers * 2 * 2,
        "8 bits": 2 * (numbers + scales * 4),
        "keys 8, values 4": numbers * 3 / 2 + 2 * scales * 4,
        "4 bits": 2 * (numbers / 2 + scales * 4),
    }
    assert {one.widths: one.row_bytes for one in found} == expected
    for one in found:
        assert one.budget == int(23.75 * expected["as they came"] / one.row_bytes)
        assert one.full_bytes / 4 - one.row_bytes < one.kept_bytes <= one.full_bytes / 4
        assert one.step_bytes == (one.budget + 1) * one.row_bytes
    assert len(found) == len(WIDTHS)


def test_layers_that_bound_themselves_count_for_nothing(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gemma3_text", head_dim=64)
    install(model, "l2norm", budget=24)
    n_bounded = sum(isinstance(cache, EvictingKVCache) for cache in make_prompt_cache(model))
    uninstall(model)
    assert 0 < n_bounded < len(model.layers)
    found = read_at_equal_bytes(model, [PASSAGE], "l2norm", n_context=84, shares=(1 / 4,))
    plain, eight, mixed, four = (one.row_bytes / (n_bounded * 2 * 2 * 64) for one in found)
    assert (plain, eight, mixed, four) == (2, 1 + 4 / 64, 3 / 4 + 4 / 64, 1 / 2 + 4 / 64)
    assert all(one.full_bytes / 4 - one.row_bytes < one.kept_bytes <= one.full_bytes / 4 for one in found)


def test_a_reading_is_that_of_a_model_with_these_rows_installed(model: nn.Module) -> None:
    asked = {"n_context": 84, "shares": (1 / 4,), "settings": {"recent": 8}, "dtype": mx.float16}
    found = read_at_equal_bytes(model, [PASSAGE], "l2norm", **asked)
    for one in found:
        key_bits, value_bits = WIDTHS[one.widths]
        install(model, "l2norm", budget=one.budget, recent=8, key_bits=key_bits, value_bits=value_bits)
        reading = read_passage(model, PASSAGE, n_context=84, prefill_step_size=84)
        uninstall(model)
        assert reading.usage.kept_bytes == one.kept_bytes
        losses = -mx.take_along_axis(reading.logprobs, reading.targets[:, None], axis=1)
        assert mx.exp(losses.mean()).item() == pytest.approx(one.perplexity, rel=2e-2)


def test_rows_are_rounded_where_the_model_computes_in_another_dtype(tiny_model: Callable[..., nn.Module]) -> None:
    wide = read_at_equal_bytes(tiny_model(head_dim=64), [PASSAGE], "l2norm", n_context=84, shares=(1 / 4,))
    assert {one.widths: one.row_bytes for one in wide}["as they came"] == 2 * 2 * 2 * 64 * 2
    assert {one.full_bytes for one in wide} == {95 * 2 * 2 * 2 * 64 * 2}


def test_the_table_sets_means_over_passages_beside_rows_as_they_came() -> None:
    divergences = {
        "as they came": (2.0, 4.0),
        "8 bits": (1.0, 0.5),
        "keys 8, values 4": (2.0, 4.0),
        "4 bits": (9.0, 9.0),
    }
    found = [
        EqualBytesReading(name, 1 / 4, passage, 10, 1.0, 2**20, 2**22, 2**20, perplexity, 2.0, divergence, 0.5)
        for name, of_passages in divergences.items()
        for passage, (divergence, perplexity) in enumerate(zip(of_passages, (2.0, 8.0), strict=True))
    ]
    table = {row["rows stored"]: row for row in by_share(found)}
    assert (table["8 bits"]["KL to full"], table["8 bits"]["of as they came"]) == (0.75, "0.25")
    assert table["8 bits"]["perplexity"] == pytest.approx(4)
    assert table["4 bits"]["of as they came"] == "3.00"

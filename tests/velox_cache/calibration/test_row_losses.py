"""What budgets cost each head: against numpy, in files, and as budgets of layers."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
from velox_cache.calibration import passages, row_losses
from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.head_projections import head_grams
from velox_cache.calibration.loss_table import LossTable
from velox_cache.installation import given_calibration
from velox_cache.installation.least_loss import least_loss
from velox_cache.introspection.attention_outputs import AttentionOutput
from velox_cache.introspection.observed_prefill import LayerQueries, observed_prefill, viewed_caches
from velox_cache.introspection.shard import WHOLE
from velox_cache.introspection.watched_calls import watched
from velox_fn import kept_positions

TEXT = "The cache holds what attention will read again, and nothing that it will not; so a page is long. " * 5


@pytest.fixture
def calibrated(tiny_model: Callable[..., nn.Module], tokenizer: Tokenizer) -> Calibration:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, "N_LATER", 48)
        return vc.calibrate(tiny_model(num_hidden_layers=3), tokenizer, [TEXT], progress=False, losses=True)


@pytest.mark.parametrize("sinks", [False, True])
def test_errors_are_those_of_attention_over_the_kept_rows(sinks: bool) -> None:
    rng = np.random.default_rng(0)
    n_later, n_rows, width = 6, 20, 12
    queries, keys, values = (rng.standard_normal((1, h, n, 8)) for h, n in ((4, n_later), (2, n_rows), (2, n_rows)))
    kept = rng.random((3, 2, n_rows - n_later)) < 0.5
    beside, gates = rng.standard_normal(4), rng.random((4, n_later))
    projection = nn.Linear(32, width, bias=True)
    matrix = np.array(projection.weight, np.float64)
    call = LayerQueries(0, *(mx.array(x.astype(np.float32)) for x in (queries, keys, values)), 0.4)
    if sinks:
        call = replace(call, terms={"sinks": mx.array(beside.astype(np.float32))})

    def read(head: int, query: int, shown: np.ndarray) -> np.ndarray:
        """What a query head reads, in its place among the inputs of the projection."""
        rows = np.flatnonzero(shown[: n_rows - n_later + query + 1])
        weights = np.exp(0.4 * keys[0, head // 2, rows] @ queries[0, head, query])
        total = weights.sum() + (np.exp(beside[head]) if sinks else 0)
        found = np.zeros(32)
        found[8 * head : 8 * head + 8] = gates[head, query] * (weights @ values[0, head // 2, rows] / total)
        return found

    every = np.ones(n_rows, bool)
    given = np.array([sum(read(head, query, every) for head in range(4)) for query in range(n_later)])
    output = AttentionOutput(projection, mx.array(given[None].astype(np.float32)), mx.ones(3), width)
    errors = row_losses._errors(call, output, mx.array(kept), head_grams(output, 2, WHOLE))

    wanted = np.zeros((2, 3))
    for kv_head, query, i in product(range(2), range(0, n_later, 2), range(3)):
        shown = np.concatenate([kept[i, kv_head], np.ones(n_later, bool)])
        error = sum(read(head, query, shown) - read(head, query, every) for head in (2 * kv_head, 2 * kv_head + 1))
        wanted[kv_head, i] += ((matrix @ error) ** 2).sum() / len(range(0, n_later, 2))
    np.testing.assert_allclose(np.array(errors), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_head_that_reads_nothing_loses_what_it_adds(
    tiny_model: Callable[..., nn.Module], calibrated: Calibration, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The model itself says what a head adds: a projection without its part adds the less, up to the norm after it."""
    layer_number = 1
    model = tiny_model(family, num_hidden_layers=2)
    tokens = [(11 * i) % 97 for i in range(348)]
    monkeypatch.setattr(passages, "N_LATER", 48)
    monkeypatch.setattr(row_losses, "_STRIDE", 1)
    nothing = mx.zeros((len(row_losses.SHARES), 2, 300), mx.bool_)
    monkeypatch.setattr(row_losses, "_kept", lambda call, *args: nothing[:, : call.keys.shape[1]])
    # Later tokens hardly count, so that a head that reads nothing of the context reads nothing.
    [passage] = passages.passages(tokens)
    passage = passages.Passage(passage.context, passage.next[:1], passage.next[:1])
    found = row_losses.measured_losses(model, [passage], calibrated, ("qfilters",), WHOLE)[layer_number]

    layer, inputs = model.layers[layer_number], [None, None]
    projection = layer.self_attn.o_proj

    def through(part: mx.array) -> mx.array:
        """What is added, of what the projection gives."""
        return part if family == "llama" else layer.post_attention_layernorm(part)

    caches = viewed_caches(model)
    model(mx.array([passage.context]), cache=caches)
    with (
        watched([projection], lambda module, arguments, result: inputs.__setitem__(0, arguments[0])),
        watched([layer], lambda module, arguments, result: inputs.__setitem__(1, arguments[0])),
    ):
        blocks = list(observed_prefill(model, passage.next, 1, caches=caches))
    [call] = [call for call in blocks[0] if call.layer == layer_number]
    given, before = (np.array(x[0, 0], np.float64) for x in inputs)
    whole = np.array(projection.weight, np.float64) @ given
    added = np.array(through(mx.array(whole.astype(np.float32))), np.float64)
    own = np.array(call.values[0, :, -1], np.float64)  # the token's own row, all that is left
    width = own.shape[1]
    losses = []
    for kv_head, rows in enumerate(own):
        missed = given.copy()
        group = 4 // len(own)
        missed[: kv_head * group * width] = missed[(kv_head + 1) * group * width :] = 0
        missed[kv_head * group * width : (kv_head + 1) * group * width] -= np.tile(rows, group)
        error = np.array(projection.weight, np.float64) @ missed
        losses.append((error**2).sum() * (added**2).mean() / (whole**2).mean() / (before**2).sum())
    np.testing.assert_allclose(np.array(found.mean())[:, 0, 0], losses, rtol=1e-3)


def test_passages_are_spread_over_a_text_and_copy_from_far_back() -> None:
    text = list(range(3072))
    found = passages.passages(text)
    assert [(part.context[0], len(part.context), part.next[-1]) for part in found] == [
        (0, 1024, 1151),
        (960, 1024, 2111),
        (1920, 1024, 3071),
    ]
    for part in found:
        assert part.next == list(range(part.context[-1] + 1, part.context[-1] + 129))
        assert part.copied == list(range(part.copied[0], part.copied[0] + 128))
        assert set(part.copied) <= set(part.context[: 1024 - 256])
    assert len({part.copied[0] - part.context[0] for part in found}) == 3
    assert [len(passages.passages(text[:n])) for n in (383, 384, 2047, 2048)] == [0, 1, 1, 2]
    assert len(passages.passages(text * 9)) == 3


def test_other_softmaxes_are_left_out(
    tiny_model: Callable[..., nn.Module], calibrated: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strange(model: nn.Module, part: list[int], *args: Any, **options: Any) -> Iterator[list[LayerQueries]]:
        for block in observed_prefill(model, part, *args, **options):
            yield [replace(call, terms={"added": mx.zeros(1)} if call.layer == 1 else {}) for call in block]

    monkeypatch.setattr(passages, "N_LATER", 48)
    monkeypatch.setattr(row_losses, "observed_prefill", strange)
    parts = passages.passages([(11 * i) % 97 for i in range(348)])
    found = row_losses.measured_losses(tiny_model(num_hidden_layers=3), parts, calibrated, ("qfilters",), WHOLE)
    assert list(found) == [0, 2]


def test_losses_of_passages_add_up(
    tiny_model: Callable[..., nn.Module], calibrated: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passages, "N_LATER", 48)
    monkeypatch.setattr(passages, "N_CONTEXT", 256)
    parts = passages.passages([(11 * i * i) % 97 for i in range(640)])
    assert len(parts) == 2
    model = tiny_model(num_hidden_layers=3)

    def sums(some: list[passages.Passage]) -> np.ndarray:
        found = row_losses.measured_losses(model, some, calibrated, ("learned",), WHOLE)
        assert {float(np.array(layer.count)) for layer in found.values()} == {2 * len(some)}
        return np.stack([np.array(layer.losses) for layer in found.values()])

    np.testing.assert_allclose(sums(parts), sums(parts[:1]) + sums(parts[1:]), rtol=1e-5)


def test_losses_lie_in_the_file(calibrated: Calibration, tmp_path: object) -> None:
    table = calibrated.losses
    assert table is not None
    assert table.methods == row_losses.METHODS
    losses = np.stack([np.array(layer.row_losses) for layer in calibrated.statistics if layer is not None])
    assert losses.shape[2:] == (len(table.methods), len(table.shares))
    assert (losses > 0).all()
    vc.save_calibration(calibrated, f"{tmp_path}/made.npz")
    again = vc.load_calibration(f"{tmp_path}/made.npz")
    assert again.losses == table
    assert mx.array_equal(again.statistics[1].row_losses, calibrated.statistics[1].row_losses).item()


def test_rows_that_count_as_kept_are_those_that_an_installed_cache_keeps(
    tiny_model: Callable[..., nn.Module], tokenizer: Tokenizer, calibrated: Calibration
) -> None:
    model, tokens = tiny_model(num_hidden_layers=3), tokenizer.encode(TEXT)[:400]
    [block] = observed_prefill(model, tokens, len(tokens))
    kept = [np.array(row_losses._kept(call, len(tokens), calibrated, ("learned",), WHOLE)) for call in block]
    for number, share in enumerate(row_losses.SHARES):
        vc.install(model, "learned", budget=int(share * len(tokens)), shares=None, calibration=calibrated)
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([tokens]), cache=caches))
        for layer, cache in enumerate(caches):
            at = np.array(kept_positions(cache.record))[0]
            assert [set(np.flatnonzero(head)) for head in kept[layer][number]] == [set(head) for head in at]


def test_a_context_that_is_kept_whole_costs_nothing(
    tiny_model: Callable[..., nn.Module], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_losses, "SHARES", (0.25, 1.0))
    monkeypatch.setattr("velox_cache.calibration.losses_together.SHARES", (0.25, 1.0))
    monkeypatch.setattr(passages, "N_LATER", 48)
    made = vc.calibrate(tiny_model(num_hidden_layers=1), tokenizer, [TEXT], progress=False, losses=True)
    [layer] = made.statistics
    losses = np.array(layer.row_losses)
    assert losses[..., 0].min() > 1e-5
    assert losses[..., 1].max() < 1e-9


def test_a_short_text_and_one_who_does_not_ask_have_none(
    tiny_model: Callable[..., nn.Module], tokenizer: Tokenizer, tmp_path: object
) -> None:
    short = vc.calibrate(tiny_model(), tokenizer, [TEXT[:200]], progress=False, losses=True)
    assert short.losses is None
    assert vc.calibrate(tiny_model(), tokenizer, [TEXT], progress=False).losses is None
    vc.save_calibration(short, f"{tmp_path}/short.npz")
    assert vc.load_calibration(f"{tmp_path}/short.npz").losses is None
    with pytest.raises(ValueError, match="holds no losses"):
        vc.calibrated_budgets(short, 64)


def test_a_found_calibration_without_losses_is_made_anew_where_it_can_be(
    tiny_model: Callable[..., nn.Module], tokenizer: Tokenizer, calibrated: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = dataclasses.replace(
        calibrated,
        statistics=[dataclasses.replace(layer, row_losses=None) for layer in calibrated.statistics],
        losses=None,
    )
    monkeypatch.setattr(given_calibration, "found_calibration", lambda model: older)
    monkeypatch.setattr(given_calibration, "made_calibration", lambda model, tokenizer, losses: calibrated)
    model = tiny_model(num_hidden_layers=3)
    with pytest.raises(ValueError, match="holds no losses"):
        vc.install(model, "learned", budget=40, shares="calibrated")
    report = vc.install(model, "learned", budget=40, shares="calibrated-layers", tokenizer=tokenizer)
    assert report.settings["budget"] == vc.calibrated_budgets(calibrated, 40, method="learned")


@pytest.mark.parametrize("seed", range(3))
def test_no_other_shares_of_the_total_lose_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = np.array([1.0, 2, 3, 4, 6])
    losses = np.sort(rng.random((4, 5)) ** 3, axis=1)[:, ::-1]
    losses[0] = [5, 4.9, 1, 0.9, 0.8]  # not convex
    found = least_loss(shares, losses, 2.0)
    assert found.mean() == pytest.approx(2)
    assert found.min() >= 1 - 1e-9

    def hull(curve: np.ndarray, at: float) -> float:
        """The lowest chord over `at`."""
        return min(
            curve[i] if i == j else curve[i] + (curve[j] - curve[i]) * (at - shares[i]) / (shares[j] - shares[i])
            for i, j in product(range(5), repeat=2)
            if (i == j and shares[i] == at) or (shares[i] < shares[j] and shares[i] <= at <= shares[j])
        )

    total = sum(hull(curve, at) for curve, at in zip(losses, found, strict=True))
    steps = np.arange(1, 6.1, 0.25)
    others = [at for at in product(steps, repeat=3) if 1 <= 8 - sum(at) <= 6]
    curves = {(one, at): hull(losses[one], at) for one in range(4) for at in steps}
    least = min(sum(curves[one, at] for one, at in enumerate((*at, 8 - sum(at)))) for at in others)
    assert total <= least + 1e-9


def test_budgets_are_of_the_asked_total(calibrated: Calibration) -> None:
    rng = np.random.default_rng(0)
    table = LossTable(("fusion",), (0.03125, 0.0625, 0.125, 0.25, 0.5), 1024)
    curves = np.sort(rng.random((3, 2, 1, 5)), axis=-1)[..., ::-1].astype(np.float32)
    statistics = [
        replace(layer, row_losses=mx.array(curve)) for layer, curve in zip(calibrated.statistics, curves, strict=True)
    ]
    made = replace(calibrated, statistics=statistics, losses=table)
    for budget in (20, 64, 100, 129, 2000):
        budgets = vc.calibrated_budgets(made, budget)
        assert sum(budgets) == 3 * budget
        assert min(budgets) >= budget // 2
    with pytest.raises(ValueError, match="losses of fusion, and not of keydiff"):
        vc.calibrated_budgets(made, 64, method="keydiff")


def test_rows_go_where_they_lower_the_loss_of_the_method(calibrated: Calibration) -> None:
    shares = np.array([0.03125, 0.0625, 0.125, 0.25, 0.5])
    falls, falls_early, flat = 1 - shares, np.maximum(0.0625 - shares, 0), 0 * shares
    statistics = [
        replace(layer, row_losses=mx.array(np.array([[of_fusion, of_learned]] * 2, np.float32)))
        for layer, of_fusion, of_learned in zip(
            calibrated.statistics, (falls, flat, flat), (flat, flat, falls_early), strict=True
        )
    ]
    table = LossTable(("fusion", "learned"), tuple(shares), 1024)
    made = replace(calibrated, statistics=statistics, losses=table)
    assert vc.calibrated_budgets(made, 64, method="fusion") == [128, 32, 32]
    assert vc.calibrated_budgets(made, 512, method="fusion") == [1024, 256, 256]  # as for a quarter of the context
    # As for a sixteenth, at which all gain nothing from what is left when the last has that much, and share it.
    assert vc.calibrated_budgets(made, 24, method="learned") == [20, 20, 32]


def test_install_takes_calibrated_shares(tiny_model: Callable[..., nn.Module], calibrated: Calibration) -> None:
    model = tiny_model(num_hidden_layers=3)
    report = vc.install(model, "learned", budget=40, shares="calibrated-layers", calibration=calibrated)
    wanted = vc.calibrated_budgets(calibrated, 40, method="learned")
    assert len(set(wanted)) > 1
    assert report.settings["budget"] == wanted
    with pytest.raises(ValueError, match="uses none"):
        vc.install(model, "l2norm", budget=40, shares="calibrated")

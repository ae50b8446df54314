"""Evicting caches whose rows are stored by codebooks, inside models: from the calibration to files and batches."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from letters import Letters
from mlx_lm.models.cache import make_prompt_cache
from replies import in_one_batch, one_by_one

import velox_cache as vc
from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.method_arrays import codebook_bits
from velox_cache.cli.inspect import describe
from velox_cache.cli.main import argument_parser
from velox_cache.cli.method_arguments import method_settings
from velox_fn import kept_positions, kv
from velox_fn.directions import codebooks

PROMPT = [(11 * i * i + 5 * i) % 97 for i in range(70)]
WIDE: dict[str, Any] = {"head_dim": 32}
TEXT = "".join(chr(97 + (7 * i * i + 3 * i) % 26) for i in range(160))


@pytest.fixture(autouse=True)
def few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebooks, "ITERATIONS", 2)


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    return tiny_model(**WIDE)


def calibrated(model: nn.Module, bits: int = 4) -> Calibration:
    return vc.calibrate(model, Letters(), [TEXT], progress=False, learned=False, codebooks=bits)


def logits_of(model: nn.Module, caches: list[Any], calls: Sequence[int]) -> mx.array:
    """The logits of PROMPT in calls of these sizes."""
    outputs, start = [], 0
    for n_tokens in calls:
        outputs.append(model(mx.array([PROMPT[start : start + n_tokens]]), cache=caches))
        start += n_tokens
    return mx.concatenate(outputs, axis=1)


class ReadBack(vc.EvictingKVCache):
    """Hands attention the rows read back as arrays: what attention over coded rows must equal."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._held.widths.read(*super().update_and_fetch(keys, values))


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_attention_equals_that_over_the_rows_read_back(tiny_model: Callable[..., nn.Module], model_type: str) -> None:
    model = tiny_model(model_type, **WIDE, hidden_size=128)
    vc.install(model, "l2norm", budget=24, codebooks=4, calibration=calibrated(model))
    caches = make_prompt_cache(model)
    evicting = [isinstance(cache, vc.EvictingKVCache) for cache in caches]
    assert any(evicting)
    read_back = [
        ReadBack(cache.method) if ours else copy.copy(cache)
        for cache, ours in zip(make_prompt_cache(model), evicting, strict=True)
    ]
    calls = [40, 8, *[1] * 10]
    found, expected = logits_of(model, caches, calls), logits_of(model, read_back, calls)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-3, atol=2e-4)


def test_the_same_rows_stay_as_without(model: nn.Module) -> None:
    calibration, kept = calibrated(model), []
    for settings in ({}, {"codebooks": 4}):
        # A method that looks at no row, since what a layer is given depends on what the one before it read.
        vc.install(model, "streaming_llm", budget=24, calibration=calibration if settings else None, **settings)
        caches = make_prompt_cache(model)
        logits_of(model, caches, [30, *[1] * 30])
        kept.append([np.array(kept_positions(cache.record)) for cache in caches])
        assert not hasattr(caches[0], "bits")
        assert not hasattr(caches[0], "group_size")
    assert all(np.array_equal(*pair) for pair in zip(*kept, strict=True))


@pytest.mark.parametrize("interval", [1, 16])
def test_a_cache_goes_on_from_a_file_bit_for_bit(model: nn.Module, interval: int, tmp_path: Path) -> None:
    vc.save_calibration(calibrated(model), tmp_path / "c.npz")
    vc.install(model, "l2norm", budget=24, interval=interval, codebooks=4, calibration=tmp_path / "c.npz")
    caches = make_prompt_cache(model)
    logits_of(model, caches, [16, 16, 8])
    vc.save_prompt_cache(tmp_path / "cache", caches)
    loaded = vc.load_prompt_cache(tmp_path / "cache")
    for token in PROMPT[40:60]:
        both = [model(mx.array([[token]]), cache=one) for one in (caches, loaded)]
        assert mx.array_equal(*both).item()
    assert [one.nbytes for one in caches] == [one.nbytes for one in loaded]


def test_a_file_whose_codebooks_are_others_is_refused(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24, codebooks=4, calibration=calibrated(model))
    cache = make_prompt_cache(model)[0]
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, 30, 32)))
    header, *leaves = cache.state
    leaves[1] = leaves[1] + 0.5
    with pytest.raises(ValueError, match="do not match their digest"):
        cache.state = (header, *leaves)


@pytest.mark.parametrize("interval", [1, 8])
def test_a_ragged_batch_generates_what_each_sequence_does_alone(model: nn.Module, interval: int) -> None:
    vc.install(model, "l2norm", budget=24, interval=interval, codebooks=4, calibration=calibrated(model))
    prompts = [PROMPT, PROMPT[7:29], PROMPT[3:8]]
    assert in_one_batch(model, prompts) == one_by_one(model, prompts)


def test_a_rollback_takes_tokens_back(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24, rollback=4, codebooks=4, calibration=calibrated(model))
    caches, shorter = make_prompt_cache(model), make_prompt_cache(model)
    logits_of(model, shorter, [40])
    logits_of(model, caches, [40, 1, 1, 1])
    for cache, expected in zip(caches, shorter, strict=True):
        assert cache.trim(3) == 3
        assert all(mx.array_equal(*pair).item() for pair in zip(kv(cache.record), kv(expected.record), strict=True))


def test_a_calibration_tells_its_codebooks_and_one_without_has_none(model: nn.Module, tmp_path: Path) -> None:
    made = calibrated(model, 2)
    vc.save_calibration(made, tmp_path / "c.npz")
    loaded = vc.load_calibration(tmp_path / "c.npz")
    assert codebook_bits(loaded) == 2
    assert "codebooks    of 2 bits a number" in describe(loaded)
    for before, after in zip(made.statistics, loaded.statistics, strict=True):
        assert before is not None
        assert after is not None
        assert mx.array_equal(before.key_codebook, after.key_codebook).item()
    plain = vc.calibrate(model, Letters(), [TEXT], progress=False, learned=False)
    assert codebook_bits(plain) is None
    assert "codebooks" not in describe(plain)


def test_the_report_counts_rows_as_they_are_stored(model: nn.Module) -> None:
    report = vc.install(model, "l2norm", budget=24, codebooks=2, calibration=calibrated(model, 2))
    assert report.footprint is not None
    assert report.footprint.most_bytes == 2 * 2 * 24 * 2 * (32 // 4 + 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codebooks": 3}, "codebooks must be one of 1, 2, 4, got 3"),
        ({"codebooks": 2}, "has codebooks of 4 bits, and codebooks=2 is asked for"),
        ({"codebooks": 4, "calibration": None}, "no calibration is given.*velox calibrate MODEL --codebooks 4"),
        ({"codebooks": 4, "bits": 8}, "codebooks=4 stores keys and values, and key_bits and value_bits too"),
        ({"codebooks": 4, "method": "streaming_llm", "renumber": True}, "renumber=True turns the stored keys"),
        ({"codebooks": 4, "method": "h2o", "merge": 16}, "merge=16 adds to stored values"),
        ({"codebooks": None}, "this method uses no calibration"),
    ],
)
def test_what_cannot_work_is_refused_at_install(model: nn.Module, arguments: dict[str, Any], message: str) -> None:
    own, made = type(make_prompt_cache(model)[0]), calibrated(model)
    with pytest.raises(ValueError, match=message):
        vc.install(model, **{"method": "l2norm", "budget": 24, "calibration": made} | arguments)
    assert type(make_prompt_cache(model)[0]) is own


def test_heads_that_cannot_be_turned_are_refused_when_calibrated(tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"keys of width 24 .* a power of two"):
        calibrated(tiny_model(head_dim=24))


def test_the_command_line_has_the_setting() -> None:
    asked = ["generate", "MODEL", "--prompt", "x", "--codebooks", "2"]
    assert method_settings(argument_parser("generate").parse_args(asked)) == {"codebooks": 2}

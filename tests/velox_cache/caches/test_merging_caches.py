"""Caches whose rows take in the values of those that leave, inside models."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from replies import in_one_batch, one_by_one

import velox_cache as vc
from velox_fn import kv

PROMPT = [(11 * i * i + 5 * i) % 97 for i in range(70)]
at_once_and_at_intervals = pytest.mark.parametrize("interval", [1, 8])


def read(model: nn.Module, caches: list[Any], tokens: list[int]) -> mx.array:
    return model(mx.array([tokens]), cache=caches)


@at_once_and_at_intervals
def test_a_cache_goes_on_from_a_file_bit_for_bit(
    tiny_model: Callable[..., nn.Module], interval: int, tmp_path: Any
) -> None:
    model = tiny_model()
    vc.install(model, "h2o", budget=24, merge=8, merge_seed=3, interval=interval)
    caches = make_prompt_cache(model)
    read(model, caches, PROMPT[:40])
    vc.save_prompt_cache(tmp_path / "cache", caches)
    loaded = vc.load_prompt_cache(tmp_path / "cache")
    assert loaded[0].method.settings["merge"] == 8
    for token in PROMPT[40:50]:
        assert mx.array_equal(*(read(model, one, [token]) for one in (caches, loaded))).item()


@at_once_and_at_intervals
def test_a_ragged_batch_generates_what_each_sequence_does_alone(
    tiny_model: Callable[..., nn.Module], interval: int
) -> None:
    model = tiny_model()
    vc.install(model, "h2o", budget=24, merge=8, interval=interval)
    prompts = [PROMPT, PROMPT[7:29], PROMPT[3:8]]
    assert in_one_batch(model, prompts) == one_by_one(model, prompts)


def test_values_are_other_than_those_of_the_method_alone(tiny_model: Callable[..., nn.Module]) -> None:
    model, values = tiny_model(), []
    for merge in (0, 8):
        vc.install(model, "snapkv", budget=40, merge=merge)
        caches = make_prompt_cache(model)
        read(model, caches, PROMPT)
        values.append(kv(caches[0].record))
    assert mx.array_equal(values[0][0], values[1][0]).item()
    assert not mx.array_equal(values[0][1], values[1][1]).item()


def test_rows_without_values_are_refused(tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"merge=8 .*caches none"):
        vc.install(tiny_model("deepseek_v3"), "h2o", budget=24, merge=8)


def test_mlx_lms_own_bits_are_refused_with_the_reason(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(head_dim=32)
    vc.install(model, "h2o", budget=24, merge=8)
    with pytest.raises(ValueError, match="merge=8 adds to stored values"):
        list(generate_step(mx.array(PROMPT), model, max_tokens=2, kv_bits=8, kv_group_size=32, quantized_kv_start=0))

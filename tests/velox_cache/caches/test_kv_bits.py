"""mlx_lm's kv_bits with evicting caches: their rows are quantised, once, and they stay bounded."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

import velox_cache as vc
from velox_fn import kept_positions, kv

PROMPT = mx.array([(11 * i) % 97 for i in range(60)])
QUANTISED: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    return tiny_model(head_dim=32)


def tokens_of(model: nn.Module, **options: Any) -> list[int]:
    return [int(token) for token, _ in generate_step(PROMPT, model, max_tokens=20, **options)]


@pytest.mark.parametrize("interval", [1, 16])
def test_caches_are_quantised_and_stay_bounded(model: nn.Module, interval: int) -> None:
    vc.install(model, "l2norm", budget=24, interval=interval)
    caches = make_prompt_cache(model)
    tokens_of(model, prompt_cache=caches, prefill_step_size=16, **QUANTISED)
    assert all(type(cache) is vc.EvictingKVCache and cache.size() <= 24 + interval for cache in caches)
    assert {cache.method.settings["key_bits"] for cache in caches} == {8}
    assert all(cache.compression_ratio > 2 * 79 / (24 + interval) for cache in caches)


@pytest.mark.parametrize("interval", [1, 16])
@pytest.mark.parametrize("seen", [[7], [40], [32, 5], [48, *[1] * 9]], ids=str)
def test_the_rows_are_those_of_a_cache_that_was_quantised_from_the_start(interval: int, seen: list[int]) -> None:
    """Its quantised rows, the ranks that they came with, and what stays afterwards."""
    from velox_fn import interval_parts, l2norm, quantised

    plain = vc.EvictingKVCache(l2norm(budget=24, interval=interval))
    early = vc.EvictingKVCache(quantised(plain.method, key_bits=8, value_bits=8, group_size=32))
    mx.random.seed(3)

    def feed(n_tokens: int, *caches: vc.EvictingKVCache) -> None:
        for part in interval_parts(caches[0].tokens_seen, n_tokens, interval):
            keys, values = (mx.random.normal((1, 2, part, 32)) for _ in range(2))
            for cache in caches:
                cache.update_and_fetch(keys, values)

    for n_tokens in seen:
        feed(n_tokens, plain, early)
    late = plain.to_quantized(group_size=32, bits=8)
    assert not hasattr(late, "to_quantized")
    for n_tokens in (0, *[1] * 40, 30):
        if n_tokens:
            feed(n_tokens, late, early)
        for one, other in zip(kv(late.record), kv(early.record), strict=True):
            assert mx.array_equal(one, other).item()
        assert np.array_equal(kept_positions(late.record), kept_positions(early.record))
    assert plain.tokens_seen == sum(seen), "the cache that was asked goes on by itself"


def test_text_is_that_of_caches_installed_with_these_bits(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24)
    asked = tokens_of(model, **QUANTISED)
    vc.install(model, "l2norm", budget=24, bits=8, group_size=32)
    assert asked == tokens_of(model)
    assert asked == tokens_of(model, **QUANTISED), "they have these bits already, and kv_bits changes nothing"


def test_plain_caches_beside_evicting_ones_are_quantised_too(
    model: nn.Module, tiny_model: Callable[..., nn.Module]
) -> None:
    plain = tiny_model(head_dim=32)
    vc.install(model, "l2norm", budget=24)
    caches = [make_prompt_cache(model)[0], make_prompt_cache(plain)[1]]
    tokens_of(model, prompt_cache=caches, **QUANTISED)
    assert [type(cache) for cache in caches] == [vc.EvictingKVCache, QuantizedKVCache]


def test_rows_wait_for_the_start_that_mlx_lm_is_given(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24)
    caches = make_prompt_cache(model)
    tokens_of(model, prompt_cache=caches, kv_bits=8, kv_group_size=32, quantized_kv_start=1000)
    assert "key_bits" not in caches[0].method.settings


def test_what_cannot_be_quantised_says_why(model: nn.Module) -> None:
    vc.install(model, "qfilters", budget=24)
    with pytest.raises(ValueError, match=r"without filters.*calibrate the model"):
        tokens_of(model, **QUANTISED)

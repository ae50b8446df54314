"""Layers without keys of their own read those of an earlier layer: they see the very rows that it saw."""

import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, make_prompt_cache
from replies import in_one_batch, one_by_one

import velox_cache as vc
from velox_fn import streaming_llm

PROMPT = [(11 * i) % 97 for i in range(90)]
TYPES = ["sliding_attention", "full_attention"] * 3
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
    "layer_types": TYPES,
}
GEMMA3N = {
    "model_type": "gemma3n_text",
    "rope_theta": 1000.0,
    "rope_local_base_freq": 1000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5, 0, 0, 0, 0, 0],
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3n": {"model_type": "gemma3n", "text_config": COMMON | GEMMA3N},
    "gemma4_text": COMMON | {"global_head_dim": 16},
}
CALLS = {"one shot": [44], "token by token": [1] * 32, "mixed": [26, 1, 1, 8, 1, 1, 6]}
METHODS: dict[str, dict[str, Any]] = {
    "qfilters": {"calib_tokens": 8},
    "streaming_llm": {"n_sink": 2},
    "h2o": {"grace": 4},
    "tova": {},
    "curdkv": {},
}


@cache
def built(name: str) -> Any:
    architecture = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = architecture.Model(architecture.ModelArgs.from_dict(MODELS[name]))
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.3 if p.ndim > 1 else p, model.parameters()))
    mx.eval(model.parameters())
    return model.eval()


@cache
def plain_logits(name: str, calls: tuple[int, ...]) -> np.ndarray:
    return logits(built(name), calls, make_prompt_cache(built(name)))


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> Iterator[nn.Module]:
    yield built(name)
    vc.uninstall(built(name))


def logits(model: nn.Module, calls: Sequence[int], caches: list[Any], read_state: bool = False) -> np.ndarray:
    outputs, start = [], 0
    for n_tokens in calls:
        outputs.append(model(mx.array([PROMPT[start : start + n_tokens]]), cache=caches))
        start += n_tokens
        if read_state:
            mx.eval([cache.state for cache in caches])
    return np.array(mx.concatenate(outputs, axis=1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("read_state", [False, True], ids=["", "state read"])
def test_logits_within_budget_are_those_of_the_plain_model(
    model: nn.Module, name: str, method: str, calls: list[int], read_state: bool
) -> None:
    plain = plain_logits(name, tuple(calls))
    vc.install(model, method, budget=200, **METHODS[method])
    np.testing.assert_array_equal(logits(model, calls, make_prompt_cache(model), read_state), plain)


class SinksAndWindow(KVCache):
    """What StreamingLLM keeps, by concatenation; the view stays until the next call."""

    def __init__(self, budget: int, n_sink: int) -> None:
        super().__init__()
        self.budget, self.n_sink = budget, n_sink

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        kept = () if self.keys is None else (self.keys, self.values)
        if kept and kept[0].shape[2] > self.budget:
            first = self.n_sink - self.budget
            kept = tuple(mx.concatenate([rows[:, :, : self.n_sink], rows[:, :, first:]], axis=2) for rows in kept)
        before = kept or (keys[:, :, :0], values[:, :, :0])
        self.keys = mx.concatenate([before[0], keys], axis=2)
        self.values = mx.concatenate([before[1], values], axis=2)
        self.offset += keys.shape[2]
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("read_state", [False, True], ids=["", "state read"])
def test_logits_over_budget_are_those_of_caches_that_keep_the_same_rows(
    model: nn.Module, calls: list[int], read_state: bool
) -> None:
    oracle = [SinksAndWindow(24, 2) if type(cache) is KVCache else cache for cache in make_prompt_cache(model)]
    expected = logits(model, calls, oracle)
    vc.install(model, "streaming_llm", budget=24, n_sink=2)
    given = logits(model, calls, make_prompt_cache(model), read_state)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)


def test_the_rows_that_leave_are_missed(model: nn.Module) -> None:
    # Otherwise the test above could pass whatever is kept.
    plain = logits(model, CALLS["mixed"], make_prompt_cache(model))
    vc.install(model, "streaming_llm", budget=24, n_sink=2)
    assert np.abs(logits(model, CALLS["mixed"], make_prompt_cache(model)) - plain).max() > 0.01


@pytest.mark.parametrize("budget", [24, 200])
@pytest.mark.parametrize("method", METHODS)
def test_ragged_batch_generates_what_each_prompt_does_alone(model: nn.Module, method: str, budget: int) -> None:
    vc.install(model, method, budget=budget, **METHODS[method])
    prompts = [PROMPT[:5], PROMPT[:70], PROMPT[:40]]
    assert in_one_batch(model, prompts) == one_by_one(model, prompts)


def test_view_can_be_had_again_after_state_was_read_while_nothing_is_evicted() -> None:
    cache, plain = vc.EvictingKVCache(streaming_llm(budget=16, n_sink=2)), KVCache()
    for n_tokens in (5, 1, 3):
        rows = mx.random.normal((1, 2, n_tokens, 8))
        for one in (cache, plain):
            one.update_and_fetch(rows, rows)
            mx.eval(one.state)
    for ours, theirs in zip(cache.keys_and_values(), plain.keys_and_values(), strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs))


def test_view_that_is_gone_is_not_replaced_by_what_is_left_of_it() -> None:
    cache = vc.EvictingKVCache(streaming_llm(budget=16, n_sink=2))
    cache.update_and_fetch(mx.zeros((1, 2, 30, 8)), mx.zeros((1, 2, 30, 8)))
    assert cache.keys_and_values()[0].shape[2] == 30
    mx.eval(cache.state)
    with pytest.raises(ValueError, match="view of the last call is gone"):
        cache.keys_and_values()

"""A package built on Velox KV, as a stranger would write it: public names only, `mypy --strict`."""

from collections.abc import Callable
from typing import Any, assert_type

import mlx.core as mx

import velox_cache
import velox_fn
from velox_fn import DynamicState, Eviction, QFiltersState, State, arrays, kept_bytes, kept_positions, kv, with_arrays

assert_type(velox_fn.__version__, str)
assert_type(velox_cache.__version__, str)


def rows_read(view: tuple[mx.array, mx.array]) -> int:
    """How many rows a query sees: a view's halves are arrays, unless the method has `bits`."""
    keys, _ = view
    return keys.shape[2]


def heads_apart(budget: int, block: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    """The first half of the heads under StreamingLLM, the others under L2Norm, in a loop of one's own."""
    keys, values = block
    half = keys.shape[1] // 2
    methods: list[Eviction] = [velox_fn.streaming_llm(budget=budget), velox_fn.l2norm(budget=budget)]
    kept = []
    for method, heads in zip(methods, (slice(0, half), slice(half, None)), strict=True):
        state = method.init(keys.shape[0], half, keys.shape[-1], values.shape[-1], keys.dtype)
        state, view = method.update(state, keys[:, heads], values[:, heads])
        assert rows_read(view) == keys.shape[2]
        state = with_arrays(state, [leaf + mx.zeros_like(leaf) for leaf in arrays(state)])
        assert_type(kv(state), tuple[mx.array, mx.array])
        assert_type(kept_bytes(state), int)
        kept.append(kept_positions(state))
    assert_type(kept, list[mx.array])
    return kept[0], kept[1]


def steps(block: tuple[mx.array, mx.array], filters: mx.array, budget: int) -> QFiltersState:
    """Q-Filters by its functions, without an `Eviction`: the record's fields are typed."""
    keys, values = block
    state = velox_fn.qfilters_init(keys.shape[0], keys.shape[1], keys.shape[-1], budget=budget, filters=filters)
    state, _ = velox_fn.qfilters_update(state, keys, values)
    assert_type(state, QFiltersState)
    assert_type(velox_fn.qfilters(budget=budget, filters=filters).init(1, 4, 16), QFiltersState)
    assert_type(state.store.offset, mx.array)
    assert_type(state.store.most_kept, int)
    return state


def compiled_steps(block: tuple[mx.array, mx.array], budget: int) -> DynamicState:
    """H2O token by token, compiled: methods, states and steps are typed by the class of the state."""
    method = velox_fn.h2o(budget=budget)
    assert_type(method, Eviction[DynamicState])
    step = velox_fn.compiled(method.update)
    keys, values = block
    state = method.init(keys.shape[0], keys.shape[1], keys.shape[-1])
    assert_type(state, DynamicState)
    for t in range(keys.shape[2]):
        token = keys[:, :, t : t + 1]
        state, view = step(state, token, values[:, :, t : t + 1], queries=token)
        assert rows_read(view) <= budget + 1
    assert_type(state, DynamicState)
    return state


def kept_of(cache: velox_cache.EvictingKVCache) -> mx.array | None:
    """The positions that a cache keeps."""
    assert_type(cache.record, State | None)
    return None if cache.record is None else kept_positions(cache.record)


def saved(caches: list[velox_cache.EvictingKVCache]) -> str:
    """What they take, as a table."""
    found = velox_cache.summary(caches)
    assert_type(found.ratio, float)
    assert_type(found.layers[0].rows, int | None)
    return str(found)


def attended(keys: mx.array, values: mx.array, cache: velox_cache.KVCache) -> mx.array:
    """Attention of a layer of one's own: it takes a cache as mlx_lm's layers do."""
    keys, values = cache.update_and_fetch(keys, values)
    return mx.softmax(keys @ keys.swapaxes(-1, -2), axis=-1) @ values


def fed(method: Eviction, block: tuple[mx.array, mx.array]) -> velox_cache.EvictingKVCache:
    """A cache of `method` that has seen the block."""
    cache = velox_cache.EvictingKVCache(method)
    attended(*block, cache)
    return cache


def bounded(model: Any, budget: int) -> velox_cache.InstallReport:
    """`model` with caches of at most `budget` rows; Any, since a strict checker finds no types in mlx.nn."""
    return velox_cache.install(model, "l2norm", budget=budget)


def factories() -> dict[str, Callable[..., Eviction]]:
    """All methods by name, as a table of one's own."""
    return dict(velox_fn.METHODS)


def settings(method: Eviction) -> dict[str, Any]:
    """What describes a method."""
    return dict(method.settings)

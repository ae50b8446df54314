"""Heads with budgets of their own: each keeps what a cache with this head alone keeps under its budget."""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import CASES, CODED, H_Q, Case, D, H

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.tiered import TieredKVCache
from velox_fn import Eviction, kept_positions, kv
from velox_fn.registry import BUILT_IN
from velox_fn.testing import Layer, bits, block

LAYER = Layer(n_kv_heads=2 * H, n_heads=2 * H_Q)
HEADS = ((0, 3), (1,), (2,))
BUDGETS = (13, 24, 16)
SHARED = H_Q // H
BY_HEAD = [case for case in (*CASES, *CODED) if not BUILT_IN[case.method].pools_heads]


def of_heads(case: Case, heads: Sequence[int], budget: int, **changes: Any) -> Eviction:
    """The case's method for these of the layer's heads: the second half of them has the arrays of the first."""
    arrays = {
        name: mx.concatenate([value, value])[list(heads)]
        for name, value in case.arguments.items()
        if isinstance(value, mx.array)
    }
    return case.make(budget=budget, **arrays, **changes)


def tiered(case: Case, **changes: Any) -> TieredKVCache:
    caches = []
    for i, (heads, budget) in enumerate(zip(HEADS, BUDGETS, strict=True)):
        method = of_heads(case, heads, budget, **place(case, sum(map(len, HEADS[:i]))), **changes)
        caches.append(EvictingKVCache(method, true_queries=True))
    return TieredKVCache(caches, HEADS)


def place(case: Case, first: int) -> dict[str, int]:
    """Draws go by the heads' place among the tiers."""
    return {"first_head": first} if "first_head" in BUILT_IN[case.method].place else {}


def fed(cache: Any, tokens: Any, calls: Sequence[int]) -> Any:
    start = 0
    for n_tokens in calls:
        keys, values, queries = (part[:, :, start : start + n_tokens] for part in tokens)
        view = cache.update_and_fetch(keys, values)
        mx.eval(cache.observe_queries(queries, queries, *view, 0.3))
        start += n_tokens
    return cache


@functools.cache
def tokens_of(n_tokens: int) -> Any:
    return block(n_tokens, layer=LAYER)


QUICK = [*{case.method: case for case in reversed(BY_HEAD)}.values(), *CODED]


@pytest.mark.parametrize(
    ("case", "interval"),
    [
        pytest.param(case, interval, marks=() if interval == 1 or case in QUICK else pytest.mark.slow)
        for case in BY_HEAD
        for interval in (1, 8)
    ],
    ids=str,
)
def test_each_head_keeps_what_it_keeps_alone(case: Case, interval: int) -> None:
    if interval > 1 and case.arguments.get("rollback"):
        return
    calls = [8, 8, 8, 8, *[1] * 5, 3]
    if interval == 1:
        calls = [30, *[1] * 4, 6]
    tokens = tokens_of(sum(calls))
    cache = fed(tiered(case, interval=interval), tokens, calls)
    assert cache.offset == sum(calls)
    together = [head for heads in HEADS for head in heads]
    for heads, budget, tier in zip(HEADS, BUDGETS, cache.tiers, strict=True):
        for i, head in enumerate(heads):
            method = of_heads(case, [head], budget, interval=interval, **place(case, together.index(head)))
            keys, values, queries = tokens
            own = (
                keys[:, head : head + 1],
                values[:, head : head + 1],
                queries[:, head * SHARED : (head + 1) * SHARED],
            )
            # Where a row's score is its own, the cuts do not matter either.
            one_block = method.static and interval == 1
            alone = fed(EvictingKVCache(method, true_queries=True), own, [sum(calls)] if one_block else calls)
            np.testing.assert_array_equal(kept_positions(tier.record)[:, i], kept_positions(alone.record)[:, 0])
            for half, expected in zip(kv(tier.record), kv(alone.record), strict=True):
                np.testing.assert_array_equal(bits(half[:, i]), bits(expected[:, 0]))


@pytest.mark.parametrize(
    "case", [case for case in BY_HEAD if case.label in ("", "calibrated", "sum", "block", "codebooks")], ids=str
)
def test_a_saved_cache_and_a_copy_go_on_alike(case: Case) -> None:
    tokens, calls = tokens_of(40), [30, *[1] * 10]
    cache = tiered(case)
    fed(cache, tokens, calls[:4])
    rest = tuple(part[:, :, 33:] for part in tokens)
    loaded = TieredKVCache.from_state(cache.state)
    for other in (loaded, cache.__deepcopy__({})):
        fed(other, rest, calls[4:])
    fed(cache, rest, calls[4:])
    for one, two in zip(cache.tiers, loaded.tiers, strict=True):
        np.testing.assert_array_equal(kept_positions(one.record), kept_positions(two.record))


def test_a_layer_holds_its_rows_and_nothing_beside_them() -> None:
    case = Case("l2norm", "")
    cache = fed(tiered(case), tokens_of(60), [40, *[1] * 20])
    rows = sum(budget * len(heads) for heads, budget in zip(HEADS, BUDGETS, strict=True))
    row = 4 * (D + LAYER.value_dim)
    landing, rank, offset = cache.heads.n_heads, 8, 4
    assert cache.kept_bytes == rows * row
    assert cache.nbytes == (rows + landing) * (row + rank) + offset * len(HEADS)
    assert cache.full_seq_bytes == 60 * cache.heads.n_heads * row

"""What a law tries a method on: tokens, the states they lead to, and what is read off them."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from velox_fn.engine.eviction import Eviction, kept_positions, kv

Tokens = tuple[mx.array, mx.array, mx.array]
"""keys [B,H,S,D], values [B,H,S,D_v], queries [B,H_q,S,D]"""
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The heads that a method is tried on: those of its params, where it has any."""

    n_kv_heads: int = 2
    n_heads: int = 4
    head_dim: int = 8
    value_dim: int = 6


LAYER = Layer()


def block(n_tokens: int, seed: int = 0, batch: int = 1, dtype: mx.Dtype = mx.float32, layer: Layer = LAYER) -> Tokens:
    """Random tokens."""
    rng = np.random.default_rng(seed)

    def rows(heads: int, dim: int) -> mx.array:
        return mx.array(rng.standard_normal((batch, heads, n_tokens, dim)).astype(np.float32)).astype(dtype)

    keys, values = rows(layer.n_kv_heads, layer.head_dim), rows(layer.n_kv_heads, layer.value_dim)
    return keys, values, rows(layer.n_heads, layer.head_dim)


def fed(method: Eviction, tokens: Tokens, calls: Sequence[int], *, proxy: bool = True) -> Any:
    """The state after `tokens` in calls of these sizes; the keys stand in for queries unless told otherwise."""
    state, start = begun(method, tokens), 0
    for n_tokens in calls:
        keys, values, queries = cut_out(tokens, start, n_tokens)
        state, _ = method.update(state, keys, values, queries=None if proxy else queries)
        start += n_tokens
    return state


def proxies(method: Eviction) -> tuple[bool, ...]:
    """Whether keys stand in for queries: tried both ways where a method reads queries."""
    return (True, False) if method.needs_queries else (True,)


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's bytes, so that NaN equals NaN and nothing is rounded."""
    return np.array(array.view(mx.uint8) if array.dtype != mx.bool_ else array)


def positions(state: Any) -> np.ndarray[Any, Any]:
    """The kept positions [B,H,n], on the host."""
    return np.array(kept_positions(state))


def same_kept(one: Any, other: Any) -> bool:
    """Whether two states keep the same rows, bit for bit."""
    pairs = zip((*kv(one), kept_positions(one)), (*kv(other), kept_positions(other)), strict=True)
    return all(np.array_equal(bits(a), bits(b)) for a, b in pairs)


def operations(outputs: Sequence[mx.array]) -> int:
    """Operations in the graph behind arrays that are not evaluated."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return graph.getvalue().count("[label")


def begun(method: Eviction, tokens: Tokens) -> Any:
    keys, values, _ = tokens
    return method.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


def cut_out(tokens: Tokens, start: int, n_tokens: int) -> Tokens:
    keys, values, queries = (part[:, :, start : start + n_tokens] for part in tokens)
    return keys, values, queries


def budget_of(method: Eviction) -> int:
    return int(method.settings["budget"])


def most_kept(method: Eviction, layer: Layer, seen: int) -> int:
    return seen if seen < _warm_up(method, layer) else min(budget_of(method), seen)


def enough(method: Eviction, layer: Layer) -> int:
    """Tokens after which rows have left."""
    return max(2 * budget_of(method) - 2, _warm_up(method, layer) + 5, 14)


def hold(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)


def _warm_up(method: Eviction, layer: Layer) -> int:
    """Tokens before which nothing is evicted."""
    return int(begun(method, block(1, layer=layer)).store.warm_up)

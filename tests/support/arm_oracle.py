"""A slow numpy model of a method that scores anew with every call, one head at a time, and what it is fed."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from oracles import best_positions

from velox_fn import Eviction, kept_positions

Floats = npt.NDArray[np.floating]
Score = Callable[[list[int], dict[int, float], range], Floats]
"""(positions held, their old scores, positions of the block) -> new scores of the positions held"""


def tokens(n_tokens: int, seed: int = 0, heads: int = 2, group: int = 2, dim: int = 8, value_dim: int = 6) -> Any:
    """Random keys [H,N,D], values [H,N,D_v], queries [H_q,N,D], float32."""
    rng = np.random.default_rng(seed)
    shapes = ((heads, n_tokens, dim), (heads, n_tokens, value_dim), (heads * group, n_tokens, dim))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def kept_after(
    method: Eviction, keys: Floats, values: Floats, queries: Floats | None, calls: Sequence[int]
) -> list[list[int]]:
    """Positions that each head keeps after these calls."""
    state = method.init(1, keys.shape[0], keys.shape[2], values.shape[2])
    start = 0
    for n_tokens in calls:
        block = slice(start, start + n_tokens)
        seen = None if queries is None else mx.array(queries[None, :, block])
        state, _ = method.update(state, mx.array(keys[None, :, block]), mx.array(values[None, :, block]), queries=seen)
        start += n_tokens
    return kept_positions(state)[0].tolist()


def simulated(calls: Sequence[int], score: Score, *, budget: int, n_sink: int, recent: int = 0) -> list[int]:
    """Positions that one head keeps when every call scores all rows by `score` and then evicts."""
    kept: list[int] = []
    scores: dict[int, float] = {}
    offset = 0
    for n_tokens in calls:
        block = range(offset, offset + n_tokens)
        held, offset = [*kept, *block], offset + n_tokens
        new = score(held, {row: scores.get(row, 0.0) for row in held}, block)
        kept = best_positions(new, held, offset, budget=budget, n_sink=n_sink, recent=recent)
        scores = dict(zip(held, new, strict=True))
    return kept


def attention(queries: Floats, query_positions: Sequence[int], keys: Floats, held: list[int]) -> Floats:
    """Causal softmax weights [S,n] of queries [S,D] over the keys [N,D] at positions `held`."""
    logits = queries.astype(np.float64) @ keys[held].astype(np.float64).T / np.sqrt(keys.shape[1])
    logits = np.where(np.array(held) <= np.array(query_positions)[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)

"""What static methods score a row by: each rule once, as a value, with what it takes of a calibration.

A scorer gives float32 [B,H,S] from the row alone, higher meaning keep. All sums over a row go through `RowSums`, whose
order the width of the row decides alone, so that a row scores the same bits whatever block it comes in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from metal_src import qfilters_score
from velox_fn.engine.named import Named
from velox_fn.engine.widening import widened

_LEAST_NORM = 1e-30
_LARGE = 2**16  # numbers of one head's keys in a block, from which heads are scored one by one

RowScore = Callable[[mx.array, mx.array, mx.array, tuple[mx.array, ...]], mx.array]
"""(keys [B,H,S,D], values [B,H,S,D_v], positions int32 [B,1,S], arrays [B,H,...]) -> float32 [B,H,S]"""


@dataclass(frozen=True)
class RowSums:
    """The two sums over a row that scorers are made of, on one backend. Rows: [B,H,S,D], any float dtype."""

    project: Callable[[mx.array, mx.array], mx.array]  # (rows, directions float32 [B,H,D]) -> float32 [B,H,S]
    square: Callable[[mx.array], mx.array]  # rows -> their squared norms, float32 [B,H,S]


@dataclass(frozen=True)
class StaticScorer:
    """A score of single rows."""

    name: str
    score: Callable[[mx.array, mx.array, mx.array, tuple[mx.array, ...], RowSums], mx.array]
    """(keys [B,H,S,D], values [B,H,S,D_v], positions int32 [B,1,S], what `takes` names, sums) -> float32 [B,H,S]"""
    takes: tuple[str, ...] = ()  # calibrated directions, each [H,D], by the name of the argument that brings it
    reads: tuple[str, ...] = ("keys",)  # the halves of a row that it reads: it is not finite where one is not
    newest_first: bool = False  # it grows with the position, rounded: among equals the higher position is better


def projection_terms(rows: mx.array, directions: mx.array) -> mx.array:
    """The terms float32 [B,H,S,D] of the projections of rows on directions [B,H,D]."""
    # Not a matrix product: its order of summation may depend on the number of rows, and then so would the kept set.
    return widened(rows) * directions[:, :, None]


def square_terms(rows: mx.array) -> mx.array:
    """The terms float32 [B,H,S,D] of the squared norms of rows."""
    exact = widened(rows)
    return exact * exact


def metal_projection(rows: mx.array, values: mx.array, directions: mx.array, positions: mx.array) -> mx.array:
    """The projections of rows on directions by the Metal kernel; -inf where rows or values are not finite."""
    # MLX's own reductions on the GPU promise no order; the kernel's is fixed by the width of the row.
    at_row = mx.broadcast_to(positions, rows.shape[:3])
    offset = mx.zeros(rows.shape[:1], mx.int32)
    return qfilters_score(rows, values, directions, at_row, offset, n_sink=0, recent=0, sign=1)


def head_by_head(
    score: RowScore, keys: mx.array, values: mx.array, positions: mx.array, taken: tuple[mx.array, ...]
) -> mx.array:
    """What `score` gives, head by head where the block is large: the same bits.

    A score of several sums has several float32 copies of the block at a time. Of one head they are small, and stay in
    memory that the process has, where those of all heads would be new pages in every call.
    """
    batch, n_heads, n_tokens, head_dim = keys.shape
    if n_tokens * head_dim < _LARGE:
        return score(keys, values, positions, taken)
    sequences = []
    for b in (slice(b, b + 1) for b in range(batch)):
        heads = [(b, slice(h, h + 1)) for h in range(n_heads)]
        scores = [score(keys[one], values[one], positions[b], tuple(array[one] for array in taken)) for one in heads]
        sequences.append(mx.concatenate(scores, axis=1))
    return mx.concatenate(sequences)


def unit_keys(keys: mx.array) -> mx.array:
    """Keys [...,D] at unit norm, float32; NaN where a key is not finite. Their mean is what `mean_keys` holds."""
    norms = mx.sqrt(square_terms(keys).sum(-1, keepdims=True))
    return widened(keys) / mx.maximum(norms, _LEAST_NORM)


def minus_cosine(keys: mx.array, directions: mx.array, sums: RowSums) -> mx.array:
    """Minus the cosine of keys to directions [B,H,D], but for the directions' lengths. KeyDiff's score."""
    return -sums.project(keys, directions) / mx.maximum(mx.sqrt(sums.square(keys)), _LEAST_NORM)


def _metal_project(rows: mx.array, directions: mx.array) -> mx.array:
    return metal_projection(rows, rows, directions, mx.zeros((1,), mx.int32))


MLX_SUMS = RowSums(
    project=lambda rows, directions: projection_terms(rows, directions).sum(-1),
    square=lambda rows: square_terms(rows).sum(-1),
)
METAL_SUMS = RowSums(
    project=_metal_project,
    square=lambda rows: _metal_project(square_terms(rows), mx.ones((*rows.shape[:2], rows.shape[3]))),
)


def _projection(
    keys: mx.array, values: mx.array, positions: mx.array, taken: tuple[mx.array, ...], sums: RowSums
) -> mx.array:
    return sums.project(keys, taken[0])


def _key_difference(
    keys: mx.array, values: mx.array, positions: mx.array, taken: tuple[mx.array, ...], sums: RowSums
) -> mx.array:
    return minus_cosine(keys, taken[0], sums)


def _key_norm(
    keys: mx.array, values: mx.array, positions: mx.array, taken: tuple[mx.array, ...], sums: RowSums
) -> mx.array:
    return -sums.square(keys)


def _value_norm(
    keys: mx.array, values: mx.array, positions: mx.array, taken: tuple[mx.array, ...], sums: RowSums
) -> mx.array:
    return sums.square(values)


def _norm_product(
    keys: mx.array, values: mx.array, positions: mx.array, taken: tuple[mx.array, ...], sums: RowSums
) -> mx.array:
    # A quotient, since fusion subtracts from it: compilers contract a product with that, in one token's step alone.
    return sums.square(keys) / (1 / sums.square(values))


def _recency(
    keys: mx.array, values: mx.array, positions: mx.array, taken: tuple[mx.array, ...], sums: RowSums
) -> mx.array:
    return mx.broadcast_to(positions, keys.shape[:3]).astype(mx.float32)


SCORERS: Mapping[str, StaticScorer] = Named(
    {
        "projection": StaticScorer("projection", _projection, takes=("filters",)),  # Q-Filters
        "key_difference": StaticScorer("key_difference", _key_difference, takes=("mean_keys",)),  # KeyDiff
        "key_norm": StaticScorer("key_norm", _key_norm),  # L2Norm
        "value_norm": StaticScorer("value_norm", _value_norm, reads=("values",)),
        "norm_product": StaticScorer("norm_product", _norm_product, reads=("keys", "values")),
        "recency": StaticScorer("recency", _recency, reads=(), newest_first=True),
    },
    """What static methods score a row by, by name: the `terms` of fusion.

    Each is a `StaticScorer`. Its `score` gives float32 [B,H,S] of keys [B,H,S,D], values [B,H,S,D_v] and positions
    int32 [B,1,S], from each row alone, higher meaning keep; `takes` names the calibrated directions [H,D] that it
    needs. projection: Q-Filters (arXiv:2503.02812). key_difference: KeyDiff (arXiv:2504.15364). key_norm: L2Norm
    (arXiv:2406.11430). value_norm, norm_product and recency have no paper. Norms are squared: they order rows as norms
    do.
    """,
)
"""The scorers by name. Norms are squared: they order rows as norms do."""

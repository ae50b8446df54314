"""Rows of a cache by value, and moves on them that keep keys, values and ranks together."""

import mlx.core as mx

from velox_fn.engine import select
from velox_fn.engine.half import Half, each, one_array
from velox_fn.engine.records import record

View = tuple[Half, Half]
"""Keys [B,H,n,D] and values [B,H,n,D_v] for attention to read; of a single token they may be quantised, as stored."""


@record
class Rows:
    """Some rows, in some order."""

    keys: Half  # [B,H,n,D]
    values: Half  # [B,H,n,D_v]
    ranks: mx.array  # int64 [B,H,n]


def gather_rows(rows: Rows, index: mx.array) -> Rows:
    """The rows at index [B,H,m], in that order."""
    return Rows(
        keys=rows_at(rows.keys, index),
        values=rows_at(rows.values, index),
        ranks=mx.take_along_axis(rows.ranks, index, axis=2),
    )


def rows_at(half: Half, index: mx.array) -> Half:
    """[B,H,m,D] of rows [B,H,n,D] at index [B,H,m]."""
    batch, n_heads = index.shape[:2]
    firsts = mx.arange(batch * n_heads, dtype=index.dtype).reshape(batch, n_heads, 1) * one_array(half).shape[2]
    # Copies whole rows by one index; take_along_axis would copy number by number.
    return each(lambda rows: mx.take(rows.reshape(-1, rows.shape[3]), firsts + index, axis=0), half)


def in_temporal_order(rows: Rows) -> Rows:
    """The same rows: real ones first by position, padding last."""
    return gather_rows(rows, temporal_order(rows.ranks))


def temporal_order(ranks: mx.array) -> mx.array:
    """Indices [B,H,n] that put real rows first by position, and padding last in row order."""
    positions = select.rank_positions(ranks).astype(mx.int64)
    last = 2**31 + mx.arange(ranks.shape[-1], dtype=mx.int64)
    return mx.argsort(mx.where(positions < 0, last, positions), axis=-1)


def arriving_positions(offset: mx.array, n_tokens: int, valid: mx.array | None) -> mx.array:
    """Positions int32 [B,1,S] of the next tokens; -1 for the right padding past `valid` int32 [B]."""
    steps = mx.arange(n_tokens, dtype=mx.int32)
    positions = (offset[:, None] + steps)[:, None]
    if valid is None:
        return positions
    return mx.where(steps < valid[:, None, None], positions, -1)


def padded(rows: Rows, n_rows: int) -> Rows:
    """`rows` with padding after them, up to `n_rows`."""
    missing = n_rows - rows.ranks.shape[2]
    if missing == 0:
        return rows
    batch, n_kv_heads = rows.ranks.shape[:2]
    padding = mx.full((batch, n_kv_heads, missing), select.PADDING)
    width = [(0, 0), (0, 0), (0, missing), (0, 0)]
    return Rows(
        keys=each(lambda part: mx.pad(part, width), rows.keys),
        values=each(lambda part: mx.pad(part, width), rows.values),
        ranks=mx.concatenate([rows.ranks, padding], axis=2),
    )

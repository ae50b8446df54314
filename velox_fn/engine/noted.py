"""Numbers that a method keeps for each row beside the store, found again by the rows' positions."""

import mlx.core as mx


def noted_at(notes: mx.array, held: mx.array, wanted: mx.array) -> mx.array:
    """Notes [B,H,m,W] of rows at positions `wanted` int32 [B,H,m], of those [B,H,n,W] at `held` [B,H,n]; else 0."""
    # Sorted together, not compared each with each: a wanted row comes right after the held one of its position.
    places = mx.concatenate([2 * held.astype(mx.int64), 2 * wanted.astype(mx.int64) + 1], axis=-1)
    order = mx.argsort(places, axis=-1)
    rank = mx.put_along_axis(order, order, mx.arange(order.shape[-1], dtype=order.dtype), axis=-1)
    before = mx.maximum(rank[..., held.shape[2] :].astype(mx.int32) - 1, 0)
    source = mx.take_along_axis(order, before, axis=-1)
    there = (mx.take_along_axis(places, source, axis=-1) == 2 * wanted.astype(mx.int64)) & (wanted >= 0)
    found = mx.take_along_axis(notes, mx.where(there, source, 0)[..., None], axis=2)
    return mx.where(there[..., None], found, 0.0)


def with_room(notes: mx.array, n_rows: int, fill: int = 0) -> mx.array:
    """Notes [B,H,n,...] with `fill` after them, up to `n_rows`."""
    room = [(0, 0), (0, 0), (0, n_rows - notes.shape[2]), *[(0, 0)] * (notes.ndim - 3)]
    return mx.pad(notes, room, constant_values=fill)

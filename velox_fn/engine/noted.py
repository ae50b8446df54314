"""Numbers that a method keeps for each row beside the store, found again by the rows' positions."""

import mlx.core as mx


def noted_at(notes: mx.array, held: mx.array, wanted: mx.array) -> mx.array:
    """Notes [B,H,m,W] of rows at positions `wanted` int32 [B,H,m], of those [B,H,n,W] at `held` [B,H,n]; else 0."""
    same = (wanted[..., None] == held[:, :, None]) & (wanted >= 0)[..., None]
    found = mx.take_along_axis(notes, mx.argmax(same, axis=-1)[..., None], axis=2)
    return mx.where(same.any(-1, keepdims=True), found, 0.0)


def with_room(notes: mx.array, n_rows: int, fill: int = 0) -> mx.array:
    """Notes [B,H,n,...] with `fill` after them, up to `n_rows`."""
    room = [(0, 0), (0, 0), (0, n_rows - notes.shape[2]), *[(0, 0)] * (notes.ndim - 3)]
    return mx.pad(notes, room, constant_values=fill)

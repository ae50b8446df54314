"""The rows that a method keeps: one record and the moves on it, the same for every method.

A store holds at most `budget` kept rows, and one more after single-token steps: the row that loses under the selection
rule stays in place until the next token overwrites it, so a step over budget writes O(D) bytes, and a token that
arrives is seen by its own query even when it is itself the next to go. That one dead row is never shown by
`kept_rows`.
"""

import dataclasses

import mlx.core as mx

from velox_fn import checks, select
from velox_fn.fused_evict import evict_rows, resolve_metal
from velox_fn.records import record

_GROWTH = 256  # rows; the step in which mlx_lm's own caches grow

View = tuple[mx.array, mx.array]


@record
class Store:
    """Rows in physical order. Everything past `filled` is preallocated room that nothing reads."""

    keys: mx.array  # [B,H,C,D], the model's dtype, bit for bit as it came
    values: mx.array  # [B,H,C,D_v]
    ranks: mx.array  # int64 [B,H,C], score and position packed (select.py)
    offset: mx.array  # int32 [B], tokens seen by each sequence
    filled: int  # rows in use, <= C
    ordered: bool  # the used rows stand in temporal order, with no padding among them
    seen_by_all: int  # tokens that every sequence has seen for certain (padded calls count for nothing)
    budget: int
    n_sink: int
    recent: int
    rollback: int  # tokens that `trim` can take back after evictions; as many more rows are kept aside
    metal: bool  # whole blocks are scored and evicted by the Metal kernels
    warm_up: int = 0  # rows kept without evicting while a method gathers what it needs to score; 0 when it is over

    @property
    def most_kept(self) -> int:
        """Most rows that `kept_rows` shows: the budget, once the method can score."""
        return max(self.budget, self.warm_up)

    @property
    def limit(self) -> int:
        """Most rows held after an eviction: the kept ones and those kept aside for a rollback."""
        return self.most_kept + self.rollback

    @property
    def protected(self) -> int:
        """The recent window that evictions honour; a rollback of r tokens moves the window back by r."""
        return self.recent + self.rollback


@record
class Rows:
    """Some rows of a store, by value."""

    keys: mx.array  # [B,H,n,D]
    values: mx.array  # [B,H,n,D_v]
    ranks: mx.array  # int64 [B,H,n]


def init_store(
    batch: int,
    n_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    dtype: mx.Dtype,
    *,
    budget: int,
    n_sink: int,
    recent: int,
    rollback: int = 0,
    use_metal_kernels: bool | None = False,
) -> Store:
    """An empty store. Raises ValueError on counts that cannot work."""
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    for name, value in (("batch", batch), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim)):
        checks.whole_number(name, value, 1)
    value_dim = head_dim if value_dim is None else checks.whole_number("value_dim", value_dim, 1)
    return Store(
        keys=mx.zeros((batch, n_kv_heads, 0, head_dim), dtype),
        values=mx.zeros((batch, n_kv_heads, 0, value_dim), dtype),
        ranks=mx.zeros((batch, n_kv_heads, 0), mx.int64),
        offset=mx.zeros((batch,), mx.int32),
        filled=0,
        ordered=True,
        seen_by_all=0,
        budget=budget,
        n_sink=n_sink,
        recent=recent,
        rollback=checks.whole_number("rollback", rollback, 0),
        metal=resolve_metal(use_metal_kernels),
    )


def check_block(store: Store, keys: mx.array, values: mx.array) -> None:
    """ValueError unless a block fits the store."""
    batch, n_kv_heads, _, head_dim = store.keys.shape
    checks.block_shapes(keys, values, batch, n_kv_heads, head_dim, store.values.shape[-1])


def arriving_positions(offset: mx.array, n_tokens: int, valid: mx.array | None) -> mx.array:
    """Positions int32 [B,1,S] of the next tokens; -1 for the right padding past `valid` int32 [B]."""
    steps = mx.arange(n_tokens, dtype=mx.int32)
    positions = (offset[:, None] + steps)[:, None]
    if valid is None:
        return positions
    return mx.where(steps < valid[:, None, None], positions, -1)


def used_rows(store: Store) -> Rows:
    """The used rows in physical order, a dead row included."""
    n = store.filled
    return Rows(keys=store.keys[:, :, :n], values=store.values[:, :, :n], ranks=store.ranks[:, :, :n])


def gather_rows(rows: Rows, index: mx.array) -> Rows:
    """The rows at index [B,H,m], in that order."""
    return Rows(
        keys=mx.take_along_axis(rows.keys, index[..., None], axis=2),
        values=mx.take_along_axis(rows.values, index[..., None], axis=2),
        ranks=mx.take_along_axis(rows.ranks, index, axis=2),
    )


def kept_rows(store: Store) -> Rows:
    """The kept rows, at most `budget`: real rows first in temporal order, padding last."""
    rows = used_rows(store)
    if store.filled > store.most_kept:
        ranks = select.competing_ranks(rows.ranks, store.offset, store.recent)
        rows = gather_rows(rows, select.survivors(ranks, store.most_kept))
    if store.ordered:
        return rows
    return gather_rows(rows, mx.argsort(temporal_keys(rows.ranks), axis=-1))


def temporal_keys(ranks: mx.array) -> mx.array:
    """Sort keys int64 that put real rows first by position and padding last in row order. [B,H,n]"""
    positions = select.rank_positions(ranks).astype(mx.int64)
    last = 2**31 + mx.arange(ranks.shape[-1], dtype=mx.int64)
    return mx.where(positions < 0, last, positions)


def seen_rows(store: Store, n_tokens: int) -> Rows:
    """The rows, in physical order, that a block of S tokens finds: for S = 1 over budget the dead row is among them."""
    if overwrites(store, n_tokens) or store.filled <= store.most_kept:
        return used_rows(store)
    return kept_rows(store)


def overwrites(store: Store, n_tokens: int) -> bool:
    """Whether the next S tokens take the dead row's place."""
    return n_tokens == 1 and store.rollback == 0 and store.filled == store.limit + 1


def land(store: Store, block: Rows, valid: mx.array | None) -> tuple[Store, View]:
    """Let a block of S tokens in, without evicting: what it may attend to is the view.

    For S = 1 over budget the dead row is overwritten and the view is the physical rows. Otherwise the view is the kept
    rows followed by the block, and the new store may stand over its limit until `settle`. `valid` int32 [B]: real
    tokens of each row; the rest is padding and is zeroed, so that no NaN of it reaches attention through a mask.
    """
    n_tokens = block.keys.shape[2]
    offset = store.offset + (n_tokens if valid is None else valid)
    if valid is None:
        store = dataclasses.replace(store, seen_by_all=store.seen_by_all + n_tokens)
    else:
        real = (select.rank_positions(block.ranks) >= 0)[..., None]
        block = dataclasses.replace(block, keys=mx.where(real, block.keys, 0), values=mx.where(real, block.values, 0))
        store = dataclasses.replace(store, ordered=False)
    if overwrites(store, n_tokens):
        keys, values, ranks = overwrite_victim(store.keys, store.values, store.ranks, store.offset, block, store.recent)
        return dataclasses.replace(store, keys=keys, values=values, ranks=ranks, offset=offset, ordered=False), (
            keys,
            values,
        )
    seen = seen_rows(store, n_tokens)
    if store.filled > store.limit:  # the dead row leaves before a block
        store = dataclasses.replace(
            store, keys=seen.keys, values=seen.values, ranks=seen.ranks, filled=store.limit, ordered=True
        )
    landed = append(store, block, offset)
    if store.filled <= store.most_kept:
        rows = used_rows(landed)
        return landed, (rows.keys, rows.values)
    return landed, (_joined(seen.keys, block.keys, 0), _joined(seen.values, block.values, 0))


def overwrite_victim(
    keys: mx.array, values: mx.array, ranks: mx.array, offset: mx.array, block: Rows, recent: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Put a one-token block in the place of the row that loses. Arrays only, so that a whole step can be compiled.

    MLX reuses a buffer that nobody else holds, so this writes one row; it copies when the old state is still held.
    """
    index = select.victim(select.competing_ranks(ranks, offset, recent))
    return (
        mx.put_along_axis(keys, index[..., None], block.keys, axis=2),
        mx.put_along_axis(values, index[..., None], block.values, axis=2),
        mx.put_along_axis(ranks, index, block.ranks, axis=2),
    )


def append(store: Store, block: Rows, offset: mx.array) -> Store:
    """`store` with the block after its used rows, in room that is there or in new room."""
    n_tokens = block.keys.shape[2]
    filled = store.filled + n_tokens
    if filled <= store.keys.shape[2]:
        grown = [
            _written(target, rows, store.filled)
            for target, rows in (
                (store.keys, block.keys),
                (store.values, block.values),
                (store.ranks, block.ranks),
            )
        ]
    else:
        room = min(-(-filled // _GROWTH) * _GROWTH, store.limit + 1) - filled
        used = used_rows(store)
        grown = [
            _joined(old, new, room)
            for old, new in ((used.keys, block.keys), (used.values, block.values), (used.ranks, block.ranks))
        ]
    keys, values, ranks = grown
    return dataclasses.replace(store, keys=keys, values=values, ranks=ranks, offset=offset, filled=filled)


def _written(target: mx.array, rows: mx.array, start: int) -> mx.array:
    written = mx.array(target)  # a second handle: the assignment below rebinds it and leaves `target` alone
    written[:, :, start : start + rows.shape[2]] = rows
    return written


def _joined(old: mx.array, new: mx.array, room: int) -> mx.array:
    parts = [old, new] if old.shape[2] else [new]
    if room > 0:
        shape = (*new.shape[:2], room, *new.shape[3:])
        parts.append(mx.zeros(shape, new.dtype))
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else new


def settle(store: Store, n_tokens: int) -> Store:
    """A store that S tokens have landed on, cut down to its limit under the selection rule, survivors in row order.

    After a single token one row more may stay: it is the dead row that the next token overwrites.
    """
    if store.filled <= store.limit or overwrites(store, n_tokens):
        return store
    rows = used_rows(store)
    if store.metal and not store.ordered:
        rows = gather_rows(rows, mx.argsort(temporal_keys(rows.ranks), axis=-1))
    competing = select.competing_ranks(rows.ranks, store.offset, store.protected)
    keys, values, ranks = evict_rows(rows.keys, rows.values, rows.ranks, competing, store.limit, metal=store.metal)
    return dataclasses.replace(store, keys=keys, values=values, ranks=ranks, filled=store.limit)


def tied(view: View, store: Store) -> View:
    """`view`, made to depend on what of the store it does not show.

    mlx_lm evaluates tokens only; an array that no token depends on would keep a graph that grows with every call.
    """
    keys, values = mx.depends(list(view), [store.keys, store.values, store.ranks, store.offset])
    return keys, values

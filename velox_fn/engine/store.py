"""The rows that a method keeps: one record and the moves on it, the same for every method.

A store holds at most `budget` kept rows, and one more after single-token steps: the landing row. It is the row that
loses under the selection rule, and it stays in place until the next token overwrites it. So a step over budget writes
O(D) bytes, and a token that arrives is seen by its own query even when it is itself the next to go. `kept_rows` never
shows the landing row.
"""

from collections.abc import Iterable, Sequence

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.fused_evict import resolve_metal
from velox_fn.engine.half import AS_THEY_CAME, Half, cut, float_dtype, one_array
from velox_fn.engine.records import record, replaced
from velox_fn.engine.rows import Rows, gather_rows, in_temporal_order, temporal_order
from velox_fn.engine.span import Span
from velox_fn.engine.storage import Storage

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of positions, in order and apart."""


@record
class Store:
    """Rows in physical order. Everything past `filled` is preallocated room that nothing reads."""

    keys: Half  # [B,H,C,D], the model's dtype, bit for bit as it came; or quantised from it, see `widths`
    values: Half  # [B,H,C,D_v]
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
    warm_up: int = 0  # first tokens from which a method gathers what it needs to score: none is evicted before
    unscored: int = 0  # the last so many used rows have no rank yet: only while the rows are all tokens, in order
    pinned: tuple[Ranges, ...] = ()  # positions of each sequence that never leave beside the sinks; (): there are none
    span: Span | None = None  # the tokens since the last boundary, where rows leave at intervals; they have no ranks
    widths: Storage = AS_THEY_CAME  # how rows are stored
    chunk: int = 1  # positions that compete as one (`chunks`): more only where rows leave at intervals

    @property
    def capacity(self) -> int:
        """C, the rows that there is room for."""
        return int(one_array(self.keys).shape[2])

    @property
    def head_dim(self) -> int:
        """D"""
        return self.widths.dims(self.keys, self.values)[0]

    @property
    def value_dim(self) -> int:
        """D_v"""
        return self.widths.dims(self.keys, self.values)[1]

    @property
    def dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        """Those that keys and values came in."""
        return float_dtype(self.keys), float_dtype(self.values)

    @property
    def most_kept(self) -> int:
        """Most rows that `kept_rows` shows: the budget, once the method can score."""
        return max(self.budget, self.warming_up)

    @property
    def warming_up(self) -> int:
        """`warm_up` until every sequence has seen so many tokens, then 0."""
        return self.warm_up if self.seen_by_all < self.warm_up else 0

    @property
    def limit(self) -> int:
        """Most rows held after an eviction: the kept ones and those kept aside for a rollback.

        A rollback may lead back into the warm-up, whose rows all stay until it cannot.
        """
        reaches_back = self.seen_by_all < self.warm_up + self.rollback
        return (max(self.budget, self.warm_up) if reaches_back else self.budget) + self.rollback

    @property
    def staying(self) -> int | mx.array:
        """The positions that never leave: how many first ones, or ranges int32 [B,P,2] that hold those too."""
        if not any(self.pinned):
            return self.n_sink
        n_ranges = 1 + max(map(len, self.pinned))
        ranges = [[(0, self.n_sink), *own, *[(0, 0)] * (n_ranges - 1 - len(own))] for own in self.pinned]
        return mx.array(ranges, mx.int32)

    @property
    def protected(self) -> int:
        """The recent window that evictions honour; a rollback of r tokens moves the window back by r."""
        return self.recent + self.rollback


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


def quantised_store(store: Store, widths: Storage) -> Store:
    """An empty store, whose rows will be kept so. ValueError where its dimensions do not allow them."""
    keys, values = widths.empty(store.keys, store.values)
    return replaced(store, keys=keys, values=values, widths=widths)


def check_block(store: Store, keys: Half, values: Half, valid: mx.array | None) -> None:
    """ValueError unless a block fits the store."""
    if isinstance(keys, tuple) or isinstance(values, tuple):  # rows of this store's own, at a boundary
        return
    batch, n_kv_heads = store.ranks.shape[:2]
    checks.block_shapes(keys, values, batch, n_kv_heads, *store.widths.dims(store.keys, store.values))
    # One dtype is given for both when a state begins: the first values may bring another.
    key_dtype, value_dtype = store.dtypes
    checks.block_dtypes(keys, values, key_dtype, value_dtype if store.filled else values.dtype)
    if valid is not None:
        checks.real_tokens(valid, batch)  # the numbers are on the device, so only the caller can check them
    else:
        checks.countable(store.seen_by_all, keys.shape[2])


def used_rows(store: Store) -> Rows:
    """The used rows in physical order, a landing row included.

    Raises ValueError while rows wait for their ranks.
    """
    n = store.filled
    if store.unscored:
        raise ValueError(
            f"{store.unscored} rows have no rank yet; pass the state through the method's `scored` first (that of "
            "`qfilters()` for states of qfilters_init)"
        )
    return Rows(keys=cut(store.keys, 0, n), values=cut(store.values, 0, n), ranks=store.ranks[:, :, :n])


def readable(store: Store, rows: Rows) -> Rows:
    """Rows of `store` with keys and values as arrays, to compute with."""
    if not store.widths.packed:
        return rows
    keys, values = store.widths.read(rows.keys, rows.values)
    return replaced(rows, keys=keys, values=values)


def competing(store: Store, ranks: mx.array, recent: int) -> mx.array:
    """`ranks` [B,H,n] of rows of `store` as they compete now: in chunks, and below those of the recent window."""
    if store.chunk > 1:
        ranks = select.chunk_ranks(ranks, store.offset, recent, store.chunk)
    return select.competing_ranks(ranks, store.offset, recent)


def kept_rows(store: Store) -> Rows:
    """The kept rows, at most `budget`: real rows first in temporal order, padding last."""
    return _best_rows(store, store.most_kept, store.recent)


def held_rows(store: Store) -> Rows:
    """The rows that an eviction leaves, at most `limit`: the kept ones and those kept aside, in the same order."""
    return _best_rows(store, store.limit, store.protected)


def _best_rows(store: Store, keep: int, recent: int) -> Rows:
    rows = used_rows(store)
    if store.filled <= keep:
        return rows if store.ordered else in_temporal_order(rows)
    index = select.survivors(competing(store, rows.ranks, recent), keep)
    if not store.ordered:  # put the indices in order first: rows move once
        order = temporal_order(mx.take_along_axis(rows.ranks, index, axis=2))
        index = mx.take_along_axis(index, order, axis=2)
    return gather_rows(rows, index)


def seen_rows(store: Store, n_tokens: int) -> Rows:
    """The rows, in physical order, that a block of S tokens finds: for S = 1 over budget with the landing row."""
    if overwrites(store, n_tokens) or store.filled <= store.most_kept:
        return used_rows(store)
    return kept_rows(store)


def overwrites(store: Store, n_tokens: int) -> bool:
    """Whether the next S tokens take the landing row's place."""
    return n_tokens == 1 and store.rollback == 0 and store.filled == store.limit + 1


def joined_pins(stores: Sequence[Store]) -> tuple[Ranges, ...]:
    """The pinned ranges of the sequences of all `stores` in turn."""
    return _if_any(ranges for store in stores for ranges in store.pinned or ((),) * store.offset.shape[0])


def taken_pins(store: Store, sequences: Sequence[int]) -> tuple[Ranges, ...]:
    """The pinned ranges of these sequences."""
    return _if_any(store.pinned[b] for b in sequences) if store.pinned else ()


def _if_any(pinned: Iterable[Ranges]) -> tuple[Ranges, ...]:
    """`pinned` as a store says it, which of none says nothing."""
    own = tuple(pinned)
    return own if any(own) else ()

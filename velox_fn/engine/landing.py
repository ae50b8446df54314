"""How a block enters a store, and how what exceeds the budget leaves it."""

import copy

import mlx.core as mx

from velox_fn.engine import select
from velox_fn.engine.fused_evict import evict_rows
from velox_fn.engine.half import Half, cut, depending, each, zeroed
from velox_fn.engine.records import arrays, replaced
from velox_fn.engine.rows import Rows, View, in_temporal_order
from velox_fn.engine.store import Store, competing, held_rows, overwrites, readable, seen_rows, used_rows

GROWTH = 256  # rows; the step in which mlx_lm's own caches grow
STEPS_KEPT = 64  # compiled steps of a kind, the last used; this library's methods need a handful


def land(store: Store, block: Rows, valid: mx.array | None) -> tuple[Store, View]:
    """Let a block of S tokens in, without evicting: what it may attend to is the view.

    For S = 1 over budget the landing row is overwritten and the view is the physical rows. Otherwise the view is the
    kept rows followed by the block, and the new store may stand over its limit until `settle`. `valid` int32 [B]: real
    tokens of each sequence. The rest is padding and is zeroed, so that no NaN of it reaches attention through a mask.

    Where rows are quantised, those of the block are so from here on. A view of one token shows the rows as stored. That
    of several tokens shows arrays: the block as it came, and the rows before it read once for all its queries.
    """
    n_tokens = block.ranks.shape[2]
    offset = store.offset + (n_tokens if valid is None else valid)
    if store.filled > store.limit and not overwrites(store, n_tokens):
        store = without_landing_row(store)
    seen_by_all = store.seen_by_all + (n_tokens if valid is None else 0)
    if valid is not None:
        padding = select.rank_positions(block.ranks) < 0
        block = replaced(block, keys=zeroed(block.keys, padding), values=zeroed(block.values, padding))
        store = replaced(store, ordered=False)
    came = block
    keys, values = store.widths.stored(block.keys, block.values)
    if overwrites(store, n_tokens):
        held = (store.keys, store.values, store.ranks, store.offset)
        keys, values, ranks = _compiled_overwrite(*held, keys, values, block.ranks, *window(store.recent))
        landed = replaced(store, keys=keys, values=values, ranks=ranks, offset=offset, ordered=False)
        return replaced(landed, seen_by_all=seen_by_all), (keys, values)
    block = replaced(block, keys=keys, values=values)
    landed = replaced(append(store, block, offset), seen_by_all=seen_by_all)
    if overwrites(landed, n_tokens):  # the next token will. Said now, so that one compiled step serves all from here on
        landed = replaced(landed, ordered=False)
    as_stored = n_tokens == 1 or not store.widths.packed
    if as_stored and store.filled <= store.most_kept:
        return landed, (cut(landed.keys, 0, landed.filled), cut(landed.values, 0, landed.filled))
    seen = seen_rows(store, n_tokens)
    if as_stored:
        return landed, (joined(seen.keys, block.keys, 0), joined(seen.values, block.values, 0))
    seen, came = readable(store, seen), readable(store, came)
    return landed, (joined(seen.keys, came.keys, 0), joined(seen.values, came.values, 0))


def without_landing_row(store: Store) -> Store:
    """`store` cut down to its limit and in temporal order; padding of short sequences comes last."""
    rows = held_rows(replaced(store, ordered=False))
    return replaced(
        store,
        keys=rows.keys,
        values=rows.values,
        ranks=rows.ranks,
        filled=rows.ranks.shape[2],
        ordered=store.seen_by_all >= store.limit,
    )


def overwrite_victim(
    keys: Half, values: Half, ranks: mx.array, offset: mx.array, block: Rows, *recent: mx.array
) -> tuple[Half, Half, mx.array]:
    """Put a one-token block, as it is stored, in the place of the row that loses. `recent` as `window` gives it.

    MLX reuses a buffer that nobody else holds, so this writes one row; it copies when the old state is still held.
    """
    index = select.victim(select.competing_ranks(ranks, offset, *(recent or (0,))))

    def put(rows: mx.array, row: mx.array) -> mx.array:
        return mx.put_along_axis(rows, index[..., None], row, axis=2)

    keys, values = each(put, keys, block.keys), each(put, values, block.values)
    return keys, values, mx.put_along_axis(ranks, index, block.ranks, axis=2)


def window(recent: int) -> tuple[mx.array, ...]:
    """The recent window as arguments of a compiled step: one number int32 [], or nothing where there is no window.

    A number in an array does not make the step anew, whatever it is; without a window the step has less to do.
    """
    return (mx.array(recent, mx.int32),) if recent else ()


def _overwrite(
    keys: Half, values: Half, ranks: mx.array, offset: mx.array, k: Half, v: Half, rank: mx.array, *recent: mx.array
) -> tuple[Half, Half, mx.array]:
    """`overwrite_victim` as a function of arrays."""
    return overwrite_victim(keys, values, ranks, offset, Rows(keys=k, values=v, ranks=rank), *recent)


_compiled_overwrite = mx.compile(_overwrite)


def append(store: Store, block: Rows, offset: mx.array) -> Store:
    """`store` with the block after its used rows, in room that is there or in new room."""
    n_tokens = block.ranks.shape[2]
    filled = store.filled + n_tokens
    if filled <= store.capacity:
        keys = written(store.keys, block.keys, store.filled)
        values = written(store.values, block.values, store.filled)
        ranks = written(store.ranks, block.ranks, store.filled)
    else:
        room = min(-(-filled // GROWTH) * GROWTH, store.limit + 1) - filled
        used = used_rows(store)
        keys = joined(used.keys, block.keys, room)
        values = joined(used.values, block.values, room)
        ranks = joined(used.ranks, block.ranks, room)
    return replaced(store, keys=keys, values=values, ranks=ranks, offset=offset, filled=filled)


def written(target: Half, rows: Half, start: int) -> Half:
    """`target` with rows [B,H,S,...] in the places from `start` on."""
    if isinstance(target, tuple):
        return tuple(written(held, new, start) for held, new in zip(target, rows, strict=True))
    longer = copy.copy(target)  # a second handle: the assignment below rebinds it and leaves `target` alone
    longer[:, :, start : start + rows.shape[2]] = rows
    return longer


def joined(old: Half, new: Half, room: int) -> Half:
    """Rows [B,H,n,...], the new ones after them, and room for so many more."""
    return each(lambda before, after: _joined(before, after, room), old, new)


def _joined(old: mx.array, new: mx.array, room: int) -> mx.array:
    parts = [old, new] if old.shape[2] else [new]
    if room > 0:
        shape = (*new.shape[:2], room, *new.shape[3:])
        parts.append(mx.zeros(shape, new.dtype))
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else new


def settle(store: Store, n_tokens: int, room: int = 1) -> Store:
    """A store that S tokens have landed on, cut down to its limit under the selection rule, survivors in row order.

    After a single token one row more may stay: it is the landing row that the next token overwrites. room: for how many
    rows more there is to be room, where rows leave.
    """
    if store.filled <= store.limit or overwrites(store, n_tokens):
        return store
    rows = used_rows(store)
    # The kernel moves rows of one array, and gives ties, which rows of a chunk are, to the lower position.
    metal = store.metal and not store.widths.packed and store.chunk == 1
    if metal and not store.ordered:
        rows = in_temporal_order(rows)
    ranks = competing(store, rows.ranks, store.protected)
    keys, values, ranks = evict_rows(rows.keys, rows.values, rows.ranks, ranks, store.limit, room, metal=metal)
    return replaced(store, keys=keys, values=values, ranks=ranks, filled=store.limit)


def tied(view: View, store: Store) -> View:
    """`view`, made to depend on what of the store it does not show.

    mlx_lm evaluates tokens only; an array that no token depends on would keep a graph that grows with every call.
    Attention reads both halves of a view, so one of them carries the rest.
    """
    keys, values = view
    return keys, depending(values, arrays((store.keys, store.values, store.ranks, store.offset)))

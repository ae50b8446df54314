"""Tokens that are only appended: their rows come after those that are there, and beside them only counts change.

So it is between the boundaries of an interval, and for single tokens within the budget of a static method, whose ranks
are made later, for many rows at once. Such a step is that of mlx_lm's own cache. Whoever holds a state may take it
alone: write rows into the room of its arrays, and tell the state of them when somebody asks for it.
"""

import mlx.core as mx

from velox_fn.engine.half import Half, cut
from velox_fn.engine.landing import GROWTH, joined, written
from velox_fn.engine.records import replaced
from velox_fn.engine.rows import View
from velox_fn.engine.slots import span_of
from velox_fn.engine.store import Store


def room(store: Store) -> int:
    """How many of the next single tokens are only appended, as they come and where there is room for them.

    As far as the rows are concerned: whether the method has more to do says `Eviction.appends`.
    """
    span = store.span
    if store.widths.packed or (span is None and not (store.ordered and store.filled == store.seen_by_all)):
        return 0
    # Without a span all tokens are there, in order, and stay. The slots of a ragged span leave no room.
    end = store.most_kept if span is None else span.settled + span.interval
    return max(min(end, store.capacity) - store.filled, 0)


def append(store: Store, keys: mx.array, values: mx.array) -> tuple[Store, View]:
    """`store`, whose sequences are in step, with a block [B,H,S,D] after its rows, and what the block may attend to.

    Quantised rows are shown as in `landing.land`.
    """
    n_tokens = keys.shape[2]
    start, filled = store.filled, store.filled + n_tokens
    new_keys, new_values = store.widths.stored(keys, values)
    if filled <= store.capacity:
        longer = written(store.keys, new_keys, start), written(store.values, new_values, start)
    else:
        span = span_of(store)  # within the budget of a static method rows get their ranks before there is new room
        new_room = min(-(-filled // GROWTH) * GROWTH, span.settled + span.interval) - filled
        held = cut(store.keys, 0, start), cut(store.values, 0, start)
        longer = joined(held[0], new_keys, new_room), joined(held[1], new_values, new_room)
    after = appended(store, *longer, n_tokens)
    if n_tokens == 1 or not store.widths.packed:
        return after, (cut(after.keys, 0, filled), cut(after.values, 0, filled))
    before = store.widths.read(cut(store.keys, 0, start), cut(store.values, 0, start))
    return after, (joined(before[0], keys, 0), joined(before[1], values, 0))


def appended(store: Store, keys: Half, values: Half, n_tokens: int) -> Store:
    """`store` after so many more tokens of each sequence, whose rows its arrays `keys` and `values` hold by now."""
    span = store.span
    if span is None:
        seen = (store.seen_by_all + n_tokens,) * store.ranks.shape[0]
    else:
        seen = tuple([seen + n_tokens for seen in span.seen])
        span = replaced(span, since=tuple([since + n_tokens for since in span.since]), seen=seen)
    return replaced(
        store,
        keys=keys,
        values=values,
        offset=mx.array(seen, mx.int32),  # a constant: adding to the old offset would be a kernel
        filled=store.filled + n_tokens,
        seen_by_all=min(seen),
        unscored=store.unscored + (n_tokens if span is None else 0),
        span=span,
    )

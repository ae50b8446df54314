"""A ragged batch between boundaries: each sequence has its own, and slots for the tokens since then. See `span`."""

from collections.abc import Sequence

import mlx.core as mx

from velox_fn.engine import select
from velox_fn.engine.half import Half, cut, each, zeroed
from velox_fn.engine.records import replaced
from velox_fn.engine.rows import Rows, View, in_temporal_order, padded
from velox_fn.engine.span import Span
from velox_fn.engine.store import Store, joined_pins, taken_pins


def span_of(store: Store) -> Span:
    """The span of a store that evicts at intervals."""
    if store.span is None:
        raise ValueError("this store evicts with every call: it has no span")
    return store.span


def opened(store: Store) -> Store:
    """`store` with a slot for every token of the interval, used or not."""
    span = span_of(store)
    if span.ragged:
        return store
    n_columns = span.settled + span.interval
    missing = max(n_columns - store.filled, 0)
    return replaced(
        store,
        keys=_widened(cut(store.keys, 0, store.filled), missing),
        values=_widened(cut(store.values, 0, store.filled), missing),
        filled=n_columns,
        ordered=False,
        span=replaced(span, ragged=True),
    )


def fitted(store: Store) -> Store:
    """`store` in its simplest form: without columns that no sequence uses, and without slots in lockstep."""
    span = span_of(store)
    settled = max(span.kept)
    start = span.settled
    fits = replaced(span, settled=settled, ragged=False)
    if len(set(span.since)) > 1 or min(span.kept) < settled:
        fits = replaced(fits, ragged=True)
    used = span.interval if fits.ragged else span.since[0]
    if settled == start and fits.ragged == span.ragged:
        return store
    store = opened(store)
    columns = [(0, settled), (start, start + used)]
    return replaced(
        store,
        keys=_side_by_side(*(cut(store.keys, a, b) for a, b in columns)),
        values=_side_by_side(*(cut(store.values, a, b) for a, b in columns)),
        ranks=store.ranks[:, :, :settled],
        filled=settled + used,
        ordered=not fits.ragged,
        span=fits,
    )


def land_in_slots(store: Store, keys: mx.array, values: mx.array, real: tuple[int, ...]) -> tuple[Store, View]:
    """Let a block in, of which the first `real` tokens of each sequence are real.

    The view is all columns. A single token stands in its slot, several stand after the columns. The view of the first
    block is the block alone. Quantised rows are shown as in `landing.land`.
    """
    store = opened(store)
    span = span_of(store)
    n_tokens = keys.shape[2]
    if n_tokens == 1 and min(real) == 1:
        index = mx.array(span.since, mx.int32)[:, None, None, None] + span.settled

        def put(rows: mx.array, row: mx.array) -> mx.array:
            return mx.put_along_axis(rows, index, row, axis=2)

        key, value = store.widths.stored(keys, values)
        landed = _advanced(store, each(put, store.keys, key), each(put, store.values, value), real)
        return landed, (landed.keys, landed.values)
    padding = (mx.arange(n_tokens) >= mx.array(real)[:, None])[:, None]
    view = keys, values = zeroed(keys, padding), zeroed(values, padding)
    if max(span.seen) > 0:
        before = store.widths.read(store.keys, store.values)
        view = _side_by_side(before[0], keys), _side_by_side(before[1], values)
    keys, values = store.widths.stored(keys, values)
    start = tuple(span.settled + since for since in span.since)
    landed = _advanced(
        store, scattered(store.keys, keys, start, real), scattered(store.values, values, start, real), real
    )
    return landed, view


def scattered(target: Half, block: Half, start: Sequence[int], real: Sequence[int]) -> Half:
    """`target` [B,H,C,D] with the first `real` rows of each sequence's block [B,H,S,D] in its columns from `start`."""
    return each(lambda held, new: _scattered(held, new, start, real), target, block)


def _scattered(target: mx.array, block: mx.array, start: Sequence[int], real: Sequence[int]) -> mx.array:
    steps = mx.arange(block.shape[2])
    n_columns = target.shape[2]
    columns = mx.where(steps < mx.array(list(real))[:, None], mx.array(list(start))[:, None] + steps, n_columns)
    room = mx.concatenate([target, mx.zeros_like(target[:, :, :1])], axis=2)  # where padding goes
    return mx.put_along_axis(room, columns[:, None, :, None], block, axis=2)[:, :, :n_columns]


def taken_store(store: Store, sequences: Sequence[int]) -> Store:
    """Only these sequences of a store that evicts at intervals, in this order."""
    index = mx.array(list(sequences), mx.int32)
    span = span_of(store).taken(tuple(sequences))
    return fitted(
        replaced(
            store,
            keys=each(lambda rows: mx.take(rows, index, axis=0), store.keys),
            values=each(lambda rows: mx.take(rows, index, axis=0), store.values),
            ranks=mx.take(store.ranks, index, axis=0),
            offset=mx.array(span.seen, mx.int32),
            seen_by_all=min(span.seen),
            pinned=taken_pins(store, sequences),
            span=replaced(
                span,
                queries=tuple(mx.take(array, index, axis=0) for array in span.queries),
                ranks=tuple(mx.take(array, index, axis=0) for array in span.ranks),
            ),
        )
    )


def joined_stores(stores: Sequence[Store]) -> Store:
    """The sequences of all `stores` in turn as one batch."""
    stores = [opened(store) for store in stores]
    spans = [span_of(store) for store in stores]
    if len({span.interval for span in spans}) > 1:
        raise ValueError(f"cannot merge stores of different intervals: {sorted({span.interval for span in spans})}")
    settled = max(span.settled for span in spans)
    parts = [_with_settled(store, settled) for store in stores]
    span = Span(
        interval=spans[0].interval,
        settled=settled,
        kept=tuple(kept for span in spans for kept in span.kept),
        since=tuple(since for span in spans for since in span.since),
        seen=tuple(seen for span in spans for seen in span.seen),
        ragged=True,
        queries=_joined_queries(spans),
        ranks=tuple(
            mx.concatenate(list(column), axis=0) for column in zip(*(span.ranks for span in spans), strict=True)
        ),
        scale=next((span.scale for span in spans if span.queries), None),
    )
    together = replaced(
        stores[0],
        keys=each(_below_each_other, *(part.keys for part in parts)),
        values=each(_below_each_other, *(part.values for part in parts)),
        ranks=mx.concatenate([part.ranks for part in parts], axis=0),
        offset=mx.array(span.seen, mx.int32),
        filled=settled + span.interval,
        ordered=False,
        seen_by_all=min(span.seen),
        pinned=joined_pins(stores),
        span=span,
    )
    return fitted(together)


def taken_back(store: Store, n_tokens: int) -> Store:
    """`store` as it was `n_tokens` tokens ago, since the last boundary of every sequence. ValueError beyond."""
    span = span_of(store)
    if n_tokens > min(span.since):
        raise ValueError(
            f"cannot take back {n_tokens} tokens: {min(span.since)} came since the last boundary, where rows left; "
            "keep a state from before the boundary and go back to it"
        )
    after = replaced(
        span,
        since=tuple(since - n_tokens for since in span.since),
        seen=tuple(seen - n_tokens for seen in span.seen),
    )
    store = replaced(store, offset=mx.array(after.seen, mx.int32), seen_by_all=min(after.seen), span=after)
    if not span.ragged:
        return replaced(store, filled=store.filled - n_tokens)
    used = mx.arange(store.filled) < mx.array([span.settled + since for since in after.since])[:, None]
    unused = ~used[:, None]
    return replaced(
        store,
        keys=zeroed(cut(store.keys, 0, store.filled), unused),
        values=zeroed(cut(store.values, 0, store.filled), unused),
    )


def settled_back(store: Store, n_tokens: int) -> Store:
    """`store`, in lockstep and with every token there, as it was any number of tokens ago.

    Rows that have settled since then wait for their ranks again: right for scores that are frozen, and for no others.
    Ranks that came with the tokens go back to them.
    """
    span, seen = span_of(store), store.seen_by_all - n_tokens
    since = seen % span.interval or min(seen, span.interval)  # at a boundary rows leave only when the next token comes
    n_sequences, settled = len(span.seen), seen - since
    ranks = tuple(_ranks_since(store, came, settled, seen) for came in span.ranks)
    after = replaced(
        span,
        ranks=ranks,
        settled=settled,
        kept=(settled,) * n_sequences,
        since=(since,) * n_sequences,
        seen=(seen,) * n_sequences,
    )
    return replaced(
        store,
        ranks=store.ranks[:, :, :settled],
        offset=mx.array(after.seen, mx.int32),
        filled=seen,
        seen_by_all=seen,
        span=after,
    )


def all_rows(store: Store) -> Rows:
    """Every row: real ones first in temporal order, padding last. Tokens since the boundary have score 0."""
    span, positions = span_of(store), column_positions(store)
    since = positions[:, :, span.settled :]
    rows = Rows(
        keys=cut(store.keys, 0, store.filled),
        values=cut(store.values, 0, store.filled),
        ranks=mx.concatenate([store.ranks, select.pack_ranks(mx.zeros(since.shape), since)], axis=2),
    )
    return in_temporal_order(rows) if span.ragged else rows


def column_positions(store: Store) -> mx.array:
    """The positions int32 [B,H,C] of the rows as they lie; -1 for padding and unused slots."""
    span = span_of(store)
    slots = mx.arange(store.filled - span.settled, dtype=mx.int32)
    since, boundary = (mx.array(counts, mx.int32)[:, None] for counts in (span.since, span.boundaries))
    positions = mx.where(slots < since, boundary + slots, -1)[:, None]
    positions = mx.broadcast_to(positions, (*store.ranks.shape[:2], slots.shape[0]))
    return mx.concatenate([select.rank_positions(store.ranks), positions], axis=2)


def used_columns(store: Store, arriving: Sequence[int] | None = None) -> mx.array:
    """bool [B,C]: the columns that hold tokens, and of the next tokens the `arriving` ones."""
    span = span_of(store)
    arriving = arriving or (0,) * len(span.since)
    n_used = mx.array([since + more for since, more in zip(span.since, arriving, strict=True)])
    columns = mx.arange(store.filled)
    kept = columns < mx.array(span.kept)[:, None]
    return kept | ((columns >= span.settled) & (columns < span.settled + n_used[:, None]))


def _ranks_since(store: Store, came: mx.array, settled: int, seen: int) -> mx.array:
    """The ranks [B,H,interval,1] of the tokens from `settled` to `seen`, where `came` holds those of the last ones."""
    ranks = mx.concatenate([store.ranks[..., None], came], axis=2)[:, :, settled:seen]
    missing = came.shape[2] - ranks.shape[2]
    return mx.pad(ranks, [(0, 0), (0, 0), (0, missing), (0, 0)], constant_values=mx.array(select.PADDING, mx.int64))


def _advanced(store: Store, keys: Half, values: Half, real: tuple[int, ...]) -> Store:
    span = span_of(store)
    seen = tuple(seen + n for seen, n in zip(span.seen, real, strict=True))
    since = tuple(since + n for since, n in zip(span.since, real, strict=True))
    return replaced(
        store,
        keys=keys,
        values=values,
        offset=mx.array(seen, mx.int32),
        seen_by_all=min(seen),
        span=replaced(span, seen=seen, since=since),
    )


def _with_settled(store: Store, n_columns: int) -> Store:
    """`store`, opened, with room for so many rows before its slots."""
    settled = span_of(store).settled
    rows = Rows(keys=cut(store.keys, 0, settled), values=cut(store.values, 0, settled), ranks=store.ranks)
    kept = padded(rows, n_columns)
    return replaced(
        store,
        keys=_side_by_side(kept.keys, cut(store.keys, settled, None)),
        values=_side_by_side(kept.values, cut(store.values, settled, None)),
        ranks=kept.ranks,
    )


def _joined_queries(spans: Sequence[Span]) -> tuple[mx.array, ...]:
    shown = next((span.queries for span in spans if span.queries), ())
    if shown and any(max(span.since) > 0 and not span.queries for span in spans):
        raise ValueError("cannot merge sequences that were shown queries since their boundary with some that were not")

    def of(span: Span, i: int) -> mx.array:
        return span.queries[i] if span.queries else mx.zeros((len(span.since), *shown[i].shape[1:]), shown[i].dtype)

    return tuple(mx.concatenate([of(span, i) for span in spans], axis=0) for i in range(len(shown)))


def _widened(half: Half, n_columns: int) -> Half:
    width = [(0, 0), (0, 0), (0, n_columns), (0, 0)]
    return each(lambda rows: mx.pad(rows, width), half) if n_columns else half


def _side_by_side(*halves: Half) -> Half:
    return each(lambda *parts: mx.concatenate(list(parts), axis=2), *halves)


def _below_each_other(*parts: mx.array) -> mx.array:
    return mx.concatenate(list(parts), axis=0)

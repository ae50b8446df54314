"""A ragged batch between boundaries: each sequence has its own, and slots for the tokens since then. See `span`."""

from collections.abc import Sequence

import mlx.core as mx

from velox_fn.engine import select
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
        keys=_widened(store.keys[:, :, : store.filled], missing),
        values=_widened(store.values[:, :, : store.filled], missing),
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
        keys=mx.concatenate([store.keys[:, :, a:b] for a, b in columns], axis=2),
        values=mx.concatenate([store.values[:, :, a:b] for a, b in columns], axis=2),
        ranks=store.ranks[:, :, :settled],
        filled=settled + used,
        ordered=not fits.ragged,
        span=fits,
    )


def land_in_slots(store: Store, keys: mx.array, values: mx.array, real: tuple[int, ...]) -> tuple[Store, View]:
    """Let a block in, of which the first `real` tokens of each sequence are no padding. The view is all columns, with a
    single token in its slot, and several after them; of the first block, the block alone.
    """
    store = opened(store)
    span = span_of(store)
    n_tokens = keys.shape[2]
    if n_tokens == 1 and min(real) == 1:
        index = mx.array(span.since, mx.int32)[:, None, None, None] + span.settled
        landed = _advanced(
            store,
            mx.put_along_axis(store.keys, index, keys, axis=2),
            mx.put_along_axis(store.values, index, values, axis=2),
            real,
        )
        return landed, (landed.keys, landed.values)
    there = (mx.arange(n_tokens) < mx.array(real)[:, None])[:, None, :, None]
    keys, values = mx.where(there, keys, 0), mx.where(there, values, 0)
    view = keys, values
    if max(span.seen) > 0:
        view = mx.concatenate([store.keys, keys], axis=2), mx.concatenate([store.values, values], axis=2)
    start = tuple(span.settled + since for since in span.since)
    landed = _advanced(
        store, scattered(store.keys, keys, start, real), scattered(store.values, values, start, real), real
    )
    return landed, view


def scattered(target: mx.array, block: mx.array, start: Sequence[int], real: Sequence[int]) -> mx.array:
    """`target` [B,H,C,D] with the first `real` rows of each sequence's block [B,H,S,D] in its columns from `start`."""
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
            keys=mx.take(store.keys, index, axis=0),
            values=mx.take(store.values, index, axis=0),
            ranks=mx.take(store.ranks, index, axis=0),
            offset=mx.array(span.seen, mx.int32),
            seen_by_all=min(span.seen),
            pinned=taken_pins(store, sequences),
            span=replaced(span, queries=tuple(mx.take(array, index, axis=0) for array in span.queries)),
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
        scale=next((span.scale for span in spans if span.queries), None),
    )
    together = replaced(
        stores[0],
        keys=mx.concatenate([part.keys for part in parts], axis=0),
        values=mx.concatenate([part.values for part in parts], axis=0),
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
    erased = ~used[:, None, :, None]
    return replaced(store, keys=mx.where(erased, 0, store.keys), values=mx.where(erased, 0, store.values))


def settled_back(store: Store, n_tokens: int) -> Store:
    """`store`, in lockstep and with every token there, as it was any number of tokens ago.

    Rows that have settled since then wait for their ranks again: right for scores that are frozen, and for no others.
    """
    span, seen = span_of(store), store.seen_by_all - n_tokens
    since = seen % span.interval or min(seen, span.interval)  # at a boundary rows leave only when the next token comes
    n_sequences, settled = len(span.seen), seen - since
    after = replaced(
        span,
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
        keys=store.keys[:, :, : store.filled],
        values=store.values[:, :, : store.filled],
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


def _advanced(store: Store, keys: mx.array, values: mx.array, real: tuple[int, ...]) -> Store:
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
    kept = padded(
        Rows(keys=store.keys[:, :, :settled], values=store.values[:, :, :settled], ranks=store.ranks), n_columns
    )
    return replaced(
        store,
        keys=mx.concatenate([kept.keys, store.keys[:, :, settled:]], axis=2),
        values=mx.concatenate([kept.values, store.values[:, :, settled:]], axis=2),
        ranks=kept.ranks,
    )


def _joined_queries(spans: Sequence[Span]) -> tuple[mx.array, ...]:
    shown = next((span.queries for span in spans if span.queries), ())
    if shown and any(max(span.since) > 0 and not span.queries for span in spans):
        raise ValueError("cannot merge sequences that were shown queries since their boundary with some that were not")

    def of(span: Span, i: int) -> mx.array:
        return span.queries[i] if span.queries else mx.zeros((len(span.since), *shown[i].shape[1:]), shown[i].dtype)

    return tuple(mx.concatenate([of(span, i) for span in spans], axis=0) for i in range(len(shown)))


def _widened(array: mx.array, n_columns: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, n_columns), (0, 0)]) if n_columns else array

"""Eviction at intervals: rows leave only when the number of tokens seen passes a multiple of `interval`.

At position m * interval the rows at lower positions are cut down to the budget, by the method's own rule for a block
of `interval` tokens. Between boundaries rows are only appended. So a token attends to the rows kept at the last
boundary at or before it, and to every token since, itself included: a function of the tokens before it, however they
were cut into calls. At most budget + interval rows are held. (kvpress calls the setting `compression_interval`.)

A method needs to know nothing of this: between boundaries its state does not change, and at a boundary it is given the
whole interval as one block. The cut is made when the first token after a boundary arrives, so that tokens can be taken
back up to and including the boundary.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks, slots
from velox_fn.engine.appending import append, room
from velox_fn.engine.attention import Queries, Reading
from velox_fn.engine.batch import merge, real_rows, take
from velox_fn.engine.eviction import Eviction, Observation, StateT
from velox_fn.engine.half import cut, depending
from velox_fn.engine.landing import GROWTH, settle, written
from velox_fn.engine.records import arrays, replaced
from velox_fn.engine.rows import View, arriving_positions
from velox_fn.engine.span import Span, begun
from velox_fn.engine.store import Store, check_block, kept_rows

Valid = mx.array | Sequence[int] | None
"""Real tokens of each sequence. An array, whose numbers only the device knows, is refused."""


def interval_parts(seen: int | Iterable[int], n_tokens: int | Sequence[int], interval: int) -> tuple[int, ...]:
    """How to cut the next S tokens into calls that cross no boundary.

    Args:
        seen: tokens seen so far, of each sequence of a ragged batch.
        n_tokens: how many come. Of a padded block: the real tokens of each sequence.
        interval: tokens from one boundary to the next.

    Returns:
        The sizes of the parts, in order. A part ends where any sequence has its boundary. The padding of the longest
        sequence may follow the last part.

    Raises:
        ValueError: interval is no whole number of at least 1.
    """
    interval = checks.whole_number("interval", interval, 1)
    seen, n_tokens = checks.plain(seen), checks.plain(n_tokens)
    seen = [seen] if isinstance(seen, int) else list(seen)
    real = [n_tokens] * len(seen) if isinstance(n_tokens, int) else list(n_tokens)
    firsts = [interval - so_far % interval for so_far in seen]
    cuts = {cut for first, n in zip(firsts, real, strict=True) for cut in range(first, n, interval)}
    return tuple(stop - start for start, stop in pairwise([0, *sorted(cuts), max(real)]))


def at_intervals(method: Eviction[StateT], interval: int) -> Eviction[StateT]:
    """`method`, with rows leaving at multiples of `interval` only; with interval=1, `method` as it is.

    Its `update` refuses a block that crosses a boundary (`interval_parts` says where to cut). It takes `valid` as a
    tuple of whole numbers, and wants queries for all blocks or for none.

    Raises:
        ValueError: interval is no whole number of at least 1, or the method keeps rows for a rollback.

    Example:
        >>> from velox_fn import at_intervals, l2norm
        >>> at_intervals(l2norm(budget=64), 16).settings["interval"]
        16
    """
    interval = checks.whole_number("interval", interval, 1)
    settings = {**method.settings, "interval": interval}
    if interval == 1:
        return dataclasses.replace(method, settings=settings)
    if method.settings.get("rollback", 0):
        raise ValueError(
            f"rollback={method.settings['rollback']} keeps rows aside for a method that evicts with every token; with "
            f"interval={interval} the tokens since the last boundary can be taken back without it: leave rollback out"
        )

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> Any:
        return begun_at_intervals(method.init(batch, n_kv_heads, head_dim, value_dim, dtype), interval)

    def update(
        state: Any, keys: mx.array, values: mx.array, *, queries: mx.array | None = None, valid: Valid = None
    ) -> tuple[Any, View]:
        return interval_update(method, state, keys, values, queries=queries, valid=valid)

    def land(state: Any, keys: mx.array, values: mx.array, valid: Valid = None) -> tuple[Any, View]:
        return _landed(method, state, keys, values, valid)

    def observe(
        state: Any,
        queries: Queries,
        scale: float | None = None,
        valid: Valid = None,
        sinks: mx.array | None = None,
    ) -> Any:
        return _with_queries(state, queries, scale, valid, sinks)

    def appends(state: Any) -> int:
        return room(state.store) if method.shown is None else 0

    return dataclasses.replace(
        method,
        init=init,
        update=update,
        settings=settings,
        observation=None if method.observation is None else Observation(land=land, observe=observe),
        scored=lambda state: state,
        ready=lambda state: settled(method, state),
        appends=appends,
    )


def begun_at_intervals(state: Any, interval: int) -> Any:
    """An empty state, with rows leaving at multiples of `interval`; with interval=1, `state` as it is."""
    if checks.whole_number("interval", interval, 1) == 1:
        return state
    return replaced(state, store=replaced(state.store, span=begun(interval, state.store.offset.shape[0])))


def interval_update(
    method: Eviction,
    state: Any,
    keys: mx.array,
    values: mx.array,
    *,
    queries: mx.array | None = None,
    valid: Valid = None,
) -> tuple[Any, View]:
    """One update of a state that evicts at intervals. `method` is the one without."""
    landed, view = _landed(method, state, keys, values, valid)
    if queries is None or not method.needs_queries:
        return landed, view
    checks.block_queries(queries, keys)
    observed = _with_queries(landed, queries, None, valid, None)
    return observed, depending(view, list(observed.store.span.queries))


def settled(method: Eviction, state: Any) -> Any:
    """`state` as its next token finds it: rows have left the sequences that have reached a boundary."""
    n_sequences, due = len(state.store.span.since), state.store.span.due
    if len(due) == n_sequences:
        return _cut(method, state)
    if not due:
        return state
    rest = tuple(b for b in range(n_sequences) if b not in due)
    joined = merge([_cut(method, take(state, due)), take(state, rest)])
    order = (*due, *rest)
    return take(joined, [order.index(b) for b in range(n_sequences)])


def _cut(method: Eviction, state: Any) -> Any:
    """All sequences stand at a boundary: what exceeds the budget leaves them."""
    span = state.store.span
    in_order = min(span.kept) == span.settled
    state = _evicted(method, state, in_order)
    store = replaced(state.store, ordered=state.store.ordered and in_order)
    rows = kept_rows(store)
    n_kept = rows.ranks.shape[2]
    if store.filled > n_kept or not store.ordered:
        store = replaced(store, keys=rows.keys, values=rows.values)
    after = Span(
        interval=span.interval,
        settled=n_kept,
        kept=tuple(min(real_rows(state.store, seen), n_kept) for seen in span.seen),
        since=(0,) * len(span.seen),
        seen=span.seen,
        ranks=span.ranks,
    )
    store = replaced(store, ranks=rows.ranks, filled=n_kept, ordered=True, span=after)
    return replaced(state, store=slots.fitted(store))


def _evicted(method: Eviction, state: Any, in_order: bool) -> Any:
    """`state`, without its span, after the method has had the whole interval as one block.

    in_order: no padding stands among the rows from before the interval.
    """
    store, span = state.store, state.store.span
    n, end = span.settled, span.settled + span.interval
    keys, values = cut(store.keys, n, end), cut(store.values, n, end)
    before = replaced(
        store,
        keys=cut(store.keys, 0, n),
        values=cut(store.values, 0, n),
        ranks=store.ranks[:, :, :n],
        offset=store.offset - span.interval,
        filled=n,
        ordered=in_order,
        seen_by_all=min(span.seen) - span.interval,
        span=None,
    )
    state = replaced(state, store=before)
    if method.arrival is not None and not before.warming_up:  # the rows are in their place: all they lack is ranks
        came = span.ranks[0][..., 0] if span.ranks else method.arrival(state, keys, values, None)
        ranks = mx.concatenate([before.ranks, came], axis=2)
        landed = replaced(store, ranks=ranks, filled=end, ordered=in_order, seen_by_all=min(span.seen), span=None)
        return replaced(state, store=settle(landed, span.interval, room=min(span.interval, GROWTH)))
    if span.queries and method.observation is not None:
        state, _ = method.observation.land(state, keys, values, None)
        sinks = span.queries[1][0] if len(span.queries) > 1 else None
        return method.observation.observe(state, span.queries[0], span.scale, None, sinks)
    return method.update(state, keys, values)[0]


def _landed(method: Eviction, state: Any, keys: mx.array, values: mx.array, valid: Valid) -> tuple[Any, View]:
    check_block(state.store, keys, values, None)
    n_tokens = keys.shape[2]
    real = _real_tokens(state.store.span, n_tokens, valid)
    _check_parts(state.store.span, n_tokens, real)
    due = state.store.span.due
    state = _with_ranks(method, settled(method, state) if due else state, keys, values, real)
    if state.store.span.ragged or min(real) < n_tokens:
        store, view = slots.land_in_slots(state.store, keys, values, real)
    else:
        store, view = append(state.store, keys, values)
    if method.shown is not None and _has_evicted(slots.span_of(store)):
        view = method.shown(view[0], _view_positions(state.store, store, n_tokens, real), store.offset), view[1]
    state = replaced(state, store=store)
    if due:  # as in landing.tied
        view = depending(view, arrays(state))
    return state, view


def _with_ranks(method: Eviction, state: Any, keys: mx.array, values: mx.array, real: tuple[int, ...]) -> Any:
    """`state` with the ranks of tokens that are about to land, where they cannot be made later."""
    span, n_tokens = state.store.span, keys.shape[2]
    if not span.ranks or method.arrival is None:
        return state
    whole = min(real) == n_tokens
    ranks = method.arrival(state, keys, values, None if whole else mx.array(real, mx.int32))[..., None]
    noted = _noted(span.ranks[0], ranks, span.since, real)
    return replaced(state, store=replaced(state.store, span=replaced(span, ranks=(noted,))))


def _noted(held: mx.array, new: mx.array, first: tuple[int, ...], real: tuple[int, ...]) -> mx.array:
    """`held` [B,H,interval,...] with what came with the first `real` tokens of each sequence, from slot `first` on."""
    if len(set(first)) == 1 and min(real) == new.shape[2]:
        noted: mx.array = written(held, new, first[0])
        return noted
    scattered: mx.array = slots.scattered(held, new, first, real)
    return scattered


def _with_queries(state: Any, queries: Queries, scale: float | None, valid: Valid, sinks: mx.array | None) -> Any:
    """`state` with the queries [B,H_q,S,D] of the tokens that landed last, and the model's attention sinks [H_q].

    Raises ValueError for queries that read other arrays than the rows, which are gone at the boundary.
    """
    if isinstance(queries, Reading):
        raise ValueError(
            "this model's attention reads other arrays than the cached rows (latent attention, or copies), and at the "
            "next boundary these are gone: its queries cannot be scored at intervals; use interval=1, queries='proxy', "
            "or a method that needs no queries"
        )
    span = state.store.span
    real = _real_tokens(span, queries.shape[2], valid)
    first = tuple(since - n for since, n in zip(span.since, real, strict=True))
    if span.queries:
        held = span.queries[0]
    elif max(first) > 0:
        raise ValueError(
            f"queries came for this block and not for the {max(first)} tokens before it since the last boundary; give "
            "them for every block, or for none"
        )
    else:
        n_sequences, n_heads, _, head_dim = queries.shape
        held = mx.zeros((n_sequences, n_heads, span.interval, head_dim), queries.dtype)
    held = _noted(held, queries, first, real)
    shown = (held,) if sinks is None else (held, mx.broadcast_to(sinks, (held.shape[0], *sinks.shape)))
    return replaced(state, store=replaced(state.store, span=replaced(span, queries=shown, scale=scale)))


def _real_tokens(span: Span, n_tokens: int, valid: Valid) -> tuple[int, ...]:
    """How many of the block's tokens are real, per sequence. ValueError when the host does not know."""
    if valid is None:
        return (n_tokens,) * len(span.since)
    if isinstance(valid, mx.array) or len(valid) != len(span.since):
        raise ValueError(
            f"valid must be {len(span.since)} whole numbers, the real tokens of each sequence, got {valid!r}: with an "
            "interval the boundaries must be known without waiting for the device"
        )
    return tuple(valid)


def _check_parts(span: Span, n_tokens: int, real: tuple[int, ...]) -> None:
    """ValueError when the block crosses a boundary, as no single token does."""
    if n_tokens == 1:
        return
    parts = interval_parts(span.seen, real, span.interval)
    if len(parts) > 1:
        raise ValueError(
            f"a block of {n_tokens} tokens after {span.seen} seen crosses a boundary at a multiple of interval="
            f"{span.interval}; call with parts of {parts} tokens (interval_parts gives them), as installed models do"
        )


def _has_evicted(span: Span) -> bool:
    return any(kept + since < seen for kept, since, seen in zip(span.kept, span.since, span.seen, strict=True))


def _view_positions(before: Store, after: Store, n_tokens: int, real: tuple[int, ...]) -> mx.array:
    """Positions int32 [B,H,n] of the rows of a view, in its order; -1 for padding."""
    if n_tokens == 1 or not slots.span_of(after).ragged:
        return slots.column_positions(after)
    block = arriving_positions(before.offset, n_tokens, mx.array(real, mx.int32))
    seen = slots.column_positions(slots.opened(before))
    return mx.concatenate([seen, mx.broadcast_to(block, (*seen.shape[:2], n_tokens))], axis=2)

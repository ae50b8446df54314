"""Sequences joining, leaving and going back: what changes a batch or an offset outside an update.

Every array of a record has the batch as its first axis, so one pair of functions serves all methods.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx

from velox_fn.engine import select, slots
from velox_fn.engine.half import cut, zeroed
from velox_fn.engine.rows import Rows, in_temporal_order, padded
from velox_fn.engine.store import Store, held_rows, joined_pins, kept_rows, taken_pins, used_rows

_State = TypeVar("_State")


def merge(states: Sequence[_State]) -> _State:
    """One state whose batch is that of all `states` in turn; shorter ones are padded to the longest.

    The states must come from one method with one set of settings; ValueError otherwise.
    """
    merged: _State = _joined(list(states))
    return merged


def take(state: _State, batch_rows: Sequence[int]) -> _State:
    """The sequences of `state` at these batch indices, in this order."""
    taken: _State = _indexed(state, list(batch_rows))
    return taken


def narrow(store: Store, n_rows: int, *, ordered: bool) -> Store:
    """`store` without its landing row and with room for `n_rows` rows: the rest must be padding, and is dropped.

    `ordered`: no padding is left.
    """
    rows = held_rows(dataclasses.replace(store, ordered=False))
    return dataclasses.replace(
        store,
        keys=cut(rows.keys, 0, n_rows),
        values=cut(rows.values, 0, n_rows),
        ranks=rows.ranks[:, :, :n_rows],
        filled=n_rows,
        ordered=ordered,
    )


def real_rows(store: Store, offset: int) -> int:
    """How many of the used rows are tokens of a sequence that has seen `offset` of them; the rest is padding."""
    if store.span is not None:
        b = store.span.seen.index(offset)
        return store.span.kept[b] + store.span.since[b]
    warmed_up = 0 < store.warming_up <= offset
    return min(offset, store.filled, store.budget) if warmed_up else min(offset, store.filled)


def has_evicted(store: Store, offset: int) -> bool:
    """Whether a sequence that has seen `offset` tokens has lost one: not while its rows warm up, nor within budget."""
    if store.span is not None:
        return real_rows(store, offset) < offset
    return offset > store.budget and offset >= store.warm_up


def with_seen(store: Store, seen_by_all: int) -> Store:
    """`store`, told how many tokens every sequence has seen, which after padded calls only the caller knows."""
    if store.span is not None:
        return store
    known = dataclasses.replace(store, seen_by_all=seen_by_all)
    over = store.warming_up > known.warming_up == 0
    return narrow(known, known.limit, ordered=False) if over and known.filled > known.limit else known


def trim(store: Store, n_tokens: int) -> Store:
    """`store` as it was `n_tokens` tokens ago. Exact when nothing was evicted, or for up to `rollback` tokens.

    Raises ValueError beyond that. The row that a token evicted comes back because `rollback` rows are kept aside. Only
    the shortest sequence's length is known here: where lengths differ, whoever merged them must know that no longer one
    has lost a row. Where rows leave at intervals: exact back to the last boundary.
    """
    if store.span is not None:
        return slots.taken_back(store, n_tokens)
    evicted = has_evicted(store, store.seen_by_all)
    if n_tokens > store.seen_by_all or (evicted and n_tokens > store.rollback):
        raise ValueError(
            f"cannot take back {n_tokens} tokens: rows have been evicted and rollback={store.rollback}; give the "
            f"method rollback={n_tokens} or more, or start again from the prompt"
        )
    shorter = dataclasses.replace(
        store,
        offset=store.offset - n_tokens,
        filled=store.filled - n_tokens,
        seen_by_all=store.seen_by_all - n_tokens,
        unscored=max(store.unscored - n_tokens, 0),
    )
    if store.ordered:  # the last rows are those of the last tokens: counts alone change, and no row is touched
        return shorter
    rows = used_rows(store)
    taken_back = select.rank_positions(rows.ranks) >= shorter.offset[:, None, None]
    # Rows of shorter sequences may stay as padding, which is finite.
    erased = Rows(
        keys=zeroed(rows.keys, taken_back),
        values=zeroed(rows.values, taken_back),
        ranks=mx.where(taken_back, select.PADDING, rows.ranks),
    )
    rows, filled = in_temporal_order(erased), shorter.filled
    return dataclasses.replace(
        shorter, keys=cut(rows.keys, 0, filled), values=cut(rows.values, 0, filled), ranks=rows.ranks[:, :, :filled]
    )


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Store):
        return _joined_stores(parts)
    if isinstance(first, mx.array):
        return mx.concatenate(parts, axis=0)
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{name: _joined([getattr(part, name) for part in parts]) for name in names})
    if any(part != first for part in parts):
        raise ValueError(f"cannot merge states with different settings: {parts}")
    return first


def _joined_stores(stores: list[Store]) -> Store:
    limits = {(store.budget, store.n_sink, store.recent, store.rollback, store.widths, store.chunk) for store in stores}
    if len(limits) > 1:
        raise ValueError(
            f"cannot merge stores of different (budget, n_sink, recent, rollback, widths, chunk): {limits}"
        )
    if stores[0].span is not None:
        return slots.joined_stores(stores)
    closed = [_with_kept_rows_only(store) for store in stores]
    filled = max(store.filled for store in closed)
    parts = [padded(used_rows(store), filled) for store in closed]
    return dataclasses.replace(
        stores[0],
        keys=_joined([rows.keys for rows in parts]),
        values=_joined([rows.values for rows in parts]),
        ranks=mx.concatenate([rows.ranks for rows in parts], axis=0),
        offset=mx.concatenate([store.offset for store in stores], axis=0),
        filled=filled,
        ordered=all(store.ordered and store.filled == filled for store in closed),
        seen_by_all=min(store.seen_by_all for store in stores),
        pinned=joined_pins(stores),
    )


def _with_kept_rows_only(store: Store) -> Store:
    """`store` without landing row and rows kept aside: in a batch, a sequence has all its rows, or the budget."""
    if store.filled <= store.most_kept:
        return store
    rows = kept_rows(dataclasses.replace(store, ordered=False))
    return dataclasses.replace(
        store,
        keys=rows.keys,
        values=rows.values,
        ranks=rows.ranks,
        filled=store.most_kept,
        ordered=store.seen_by_all >= store.most_kept,
    )


def _indexed(part: Any, sequences: list[int]) -> Any:
    if isinstance(part, Store) and part.span is not None:
        return slots.taken_store(part, sequences)
    if isinstance(part, Store):
        arrays = {name: _indexed(getattr(part, name), sequences) for name in ("keys", "values", "ranks", "offset")}
        return dataclasses.replace(part, **arrays, pinned=taken_pins(part, sequences))
    if isinstance(part, mx.array):
        return mx.take(part, mx.array(sequences, mx.int32), axis=0)
    if isinstance(part, tuple):
        return tuple(_indexed(leaf, sequences) for leaf in part)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part)]
        return dataclasses.replace(part, **{name: _indexed(getattr(part, name), sequences) for name in names})
    return part

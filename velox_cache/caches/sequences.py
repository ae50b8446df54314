"""The sequences behind one cache: a method's record and what the host knows of each sequence, moved as one value."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from velox_fn.engine import batch, checks
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.half import as_dtype
from velox_fn.engine.pinned import pinned_by_sequence
from velox_fn.engine.records import replaced
from velox_fn.engine.store import Ranges, Store


@dataclass(frozen=True, eq=False)
class Sequences:
    """One sequence, or those of a batch. Counts are Python ints: asking for one never waits for the device."""

    record: Any | None = None  # the method's own; None before the first token
    offsets: tuple[int, ...] = (0,)  # tokens seen, per sequence
    batched: bool = False  # sequences differ in offset; otherwise the one offset stands for all
    lengths: tuple[int, ...] | None = None  # real tokens to come, per sequence, while a padded prefill runs
    padding: tuple[int, ...] = ()  # padding to come before the next real token, per sequence; (): none
    pinned: tuple[Ranges, ...] = ()  # what sequences have pinned beside the method's, per sequence; (): nothing

    @property
    def store(self) -> Store:
        """The record's rows. Raises ValueError before the first token."""
        if self.record is None:
            raise ValueError("this cache has seen no token yet")
        store: Store = self.record.store
        return store

    @property
    def kept(self) -> int:
        """Rows that attention finds."""
        if self.record is None:
            return 0
        at_boundary = self.store.span is None or self.store.span.due
        return min(self.store.filled, self.store.most_kept) if at_boundary else self.store.filled

    @property
    def ragged(self) -> bool:
        """Whether some sequences hold padding."""
        return self.record is not None and self.batched and min(self.real_rows) < self.store.filled

    @property
    def real_rows(self) -> tuple[int, ...]:
        """Physical rows that are tokens, a landing row included, per sequence."""
        return tuple(batch.real_rows(self.store, offset) for offset in self.offsets)

    @property
    def offset_of_each(self) -> tuple[int, ...]:
        """Tokens seen, also where one offset stands for a batch in lockstep."""
        if self.batched or self.record is None:
            return self.offsets
        return self.offsets * int(self.store.offset.shape[0])

    @property
    def pinned_of_each(self) -> tuple[Ranges, ...]:
        """Ranges pinned for each sequence, also where one entry stands for a batch in lockstep."""
        n = len(self.offset_of_each)
        return self.pinned * n if len(self.pinned) == 1 else self.pinned or ((),) * n

    def index(self, name: str, sequence: object) -> int:
        """`sequence` as the index of one of the batch, counted from the end when negative.

        Raises ValueError, naming the argument, when there is no such sequence.
        """
        n = len(self.offset_of_each)
        index = checks.whole_number(name, sequence, -n)
        if index >= n:
            raise ValueError(f"{name} must name one of the {n} sequences of this batch, from 0 on, got {index}")
        return index % n

    def padding_first(self, n_tokens: int) -> tuple[int, ...]:
        """How many of the next tokens are padding that comes before real ones, per sequence."""
        return tuple(min(left, n_tokens) for left in self.padding) if self.padding else (0,) * len(self.offsets)

    def real_tokens(self, n_tokens: int) -> tuple[int, ...]:
        """How many of the next tokens are real, per sequence. Raises ValueError when one cannot count them."""
        if self.lengths is None and not self.padding:
            checks.countable(max(self.offsets, default=0), n_tokens)
            return (n_tokens,) * len(self.offsets)
        room = [n_tokens - first for first in self.padding_first(n_tokens)]
        lengths = room if self.lengths is None else self.lengths
        real = tuple(min(max(left, 0), most) for left, most in zip(lengths, room, strict=True))
        for offset, count in zip(self.offsets, real, strict=True):
            checks.countable(offset, count)
        return real

    def counts(self, name: str, given: Sequence[int]) -> tuple[int, ...]:
        """One number for each sequence; () for none. Raises ValueError, naming the argument."""
        if given and len(given) != len(self.offsets):
            raise ValueError(
                f"{name} has {len(given)} entries for a batch of {len(self.offsets)} sequences; give one for each"
            )
        return tuple(checks.whole_number(f"{name}[{i}]", count, 0) for i, count in enumerate(given))

    def advanced(self, record: Any, real: Sequence[int], n_tokens: int) -> "Sequences":
        """After an update that took in a block of `n_tokens`, `real` of them for each sequence."""
        after = replaced(self, record=record, offsets=tuple(map(operator.add, self.offsets, real)))
        if self.lengths is None and not self.padding:
            return after
        lengths = None if self.lengths is None else tuple(map(operator.sub, self.lengths, real))
        padding = tuple(max(left - n_tokens, 0) for left in self.padding)
        return _known_offsets(replaced(after, lengths=lengths, padding=padding if any(padding) else ()))

    def with_store(self, store: Store) -> "Sequences":
        record: Any = self.record
        return replace(self, record=replace(record, store=store))


def merged(parts: Sequence[Sequences], method: Eviction) -> Sequences:
    """All sequences of `parts` as one batch, in the dtypes of the first that has any."""
    parts = [part for part in parts if part.offsets]
    offsets = tuple(offset for part in parts for offset in part.offset_of_each)
    lengths = tuple(length for part in parts for length in part.lengths or ())
    together = Sequences(
        offsets=offsets,
        batched=True,
        lengths=lengths if lengths and len(lengths) == len(offsets) else None,
        padding=_together(part.padding or (0,) * len(part.offset_of_each) for part in parts),
        pinned=tuple(ranges for part in parts for ranges in part.pinned_of_each),
    )
    filled = [part for part in parts if part.record is not None]
    if not filled:
        return together
    like = filled[0].store
    key_dtype, value_dtype = like.dtypes

    def empty(part: Sequences) -> Any:
        n_sequences, n_kv_heads = len(part.offsets), like.ranks.shape[1]
        record = method.init(n_sequences, n_kv_heads, like.head_dim, like.value_dim, key_dtype)
        return pinned_by_sequence(record, part.pinned_of_each)

    def alike(record: Any) -> Any:
        keys, values = as_dtype(record.store.keys, key_dtype), as_dtype(record.store.values, value_dtype)
        return replace(record, store=replace(record.store, keys=keys, values=values))

    records = [alike(empty(part) if part.record is None else part.record) for part in parts]
    return _known_offsets(replace(together, record=batch.merge(records)))


def selected(rows: Sequences, indices: Sequence[int]) -> Sequences:
    """Only these sequences of the batch, in this order; padding that none needs any more is dropped.

    Without any, what is left is a batch that has seen nothing, and that others may join.
    """
    if not indices:
        return Sequences(offsets=(), batched=True)
    left = replace(
        rows,
        record=None if rows.record is None else batch.take(rows.record, indices),
        offsets=tuple(rows.offsets[index] for index in indices) if rows.batched else rows.offsets,
        lengths=None if rows.lengths is None else tuple(rows.lengths[index] for index in indices),
        padding=tuple(rows.padding[index] for index in indices) if rows.padding else (),
        pinned=tuple(rows.pinned[index] for index in indices) if rows.batched and rows.pinned else rows.pinned,
    )
    if left.record is None:
        return left
    left = _known_offsets(left)
    longest = max(left.real_rows)
    if longest == left.store.filled or left.store.span is not None:
        return left
    ordered = min(left.real_rows) == longest
    return left.with_store(batch.narrow(left.store, min(longest, left.store.limit), ordered=ordered))


def extracted(rows: Sequences, index: int) -> Sequences:
    """One sequence of the batch, by itself and without padding."""
    offset = rows.offset_of_each[index]
    alone = Sequences(offsets=(offset,), pinned=(rows.pinned_of_each[index],))
    if rows.record is None or offset == 0:
        return alone
    n_rows = min(batch.real_rows(rows.store, offset), rows.store.limit)
    taken = replace(alone, record=batch.take(rows.record, [index]))
    if taken.store.span is not None:
        return taken
    return _known_offsets(taken.with_store(batch.narrow(taken.store, n_rows, ordered=True)))


def trimmed(rows: Sequences, n_tokens: int) -> Sequences:
    """The sequences as they were `n_tokens` tokens ago; see `velox_fn.engine.batch.trim`."""
    known = _known_offsets(rows)
    shorter = replace(known, offsets=tuple(offset - n_tokens for offset in rows.offsets))
    store = batch.trim(known.store, n_tokens)
    # A constant, where a difference would wait for the thread that made it.
    return shorter.with_store(replace(store, offset=mx.array(shorter.offset_of_each, mx.int32)))


def _together(paddings: Iterable[Sequence[int]]) -> tuple[int, ...]:
    padding = tuple(itertools.chain.from_iterable(paddings))
    return padding if any(padding) else ()


def _known_offsets(rows: Sequences) -> Sequences:
    """Tell the record what only the host knows for certain after padded calls."""
    if rows.record is None:
        return rows
    return rows.with_store(batch.with_seen(rows.store, min(rows.offsets)))

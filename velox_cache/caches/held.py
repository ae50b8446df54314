"""All that one cache holds, as one value: the adapter puts another in its place, and changes nothing in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx

from velox_cache.caches.masks import mask_of_next
from velox_cache.caches.own_attention import shown
from velox_cache.caches.padding import padding_last
from velox_cache.caches.sequences import Sequences, extracted, merged, selected
from velox_cache.caches.state import same_method
from velox_cache.caches.trimming import Past, has_evicted, interval_of, rollback_of
from velox_fn.engine import checks
from velox_fn.engine.appending import appended
from velox_fn.engine.attention import Queries
from velox_fn.engine.eviction import Eviction, Observation, check_state
from velox_fn.engine.half import cut
from velox_fn.engine.pinned import Pinned, check_room, pinned_by_sequence, pinned_ranges
from velox_fn.engine.quantised import converted, quantised
from velox_fn.engine.records import replaced
from velox_fn.engine.rows import View
from velox_fn.engine.storage import Storage

_Block = TypeVar("_Block", mx.array, mx.array | None)


class MissingQueriesError(ValueError):
    """A method that scores by the model's own queries was not shown them."""


@dataclass(frozen=True)
class _Waiting:
    """A block that is in the cache and waits for its queries."""

    valid: Any
    padding: tuple[int, ...]  # that comes first in the block, per sequence

    def in_order(self, block: _Block) -> _Block:
        """The block's queries, or a mask of them, as its rows were taken in: real tokens first."""
        return block if block is None else padding_last(block, self.padding)


@dataclass(frozen=True, eq=False)
class Held:
    """The sequences of one cache, the method that bounds them, and how far back they can go."""

    method: Eviction
    true_queries: bool  # a block waits for its queries
    rows: Sequences
    past: Past
    waiting: _Waiting | None = None

    @classmethod
    def nothing(cls, method: Eviction, *, true_queries: bool, snapshots: int) -> "Held":
        """Before the first token. ValueError when `method` is no Eviction, or its states do not fit a cache."""
        if not isinstance(method, Eviction):
            raise ValueError(
                f"EvictingKVCache takes an Eviction, such as velox_fn.qfilters(budget=512) makes, got "
                f"{type(method).__name__}; a name goes to install"
            )
        _ = method.states_fit  # or raises
        past = Past.of(method, checks.whole_number("snapshots", snapshots, 0))
        return cls(method, true_queries and method.observation is not None, Sequences(), past)

    @property
    def widths(self) -> Storage:
        """How rows are stored."""
        return self.method.widths

    # A token's way in

    @property
    def appends(self) -> int:
        """How many of the next single tokens are only appended, and change nothing else but counts."""
        rows = self.rows
        if rows.record is None or self._observation is not None or rows.lengths is not None or rows.padding:
            return 0
        return min(self.method.appends(rows.record), checks.MOST_TOKENS - max(rows.offsets))

    def without_rows(self) -> "Held":
        """For whoever appends to the rows, and hands them to `appended`."""
        return replaced(self, rows=self.rows.with_store(replaced(self.rows.store, keys=None, values=None)))

    def appended(self, keys: mx.array, values: mx.array, n_tokens: int) -> "Held":
        """After so many more single tokens, whose rows these arrays of the store hold by now."""
        record = self.rows.record
        record = replaced(record, store=appended(self.rows.store, keys, values, n_tokens))
        real = (n_tokens,) * len(self.rows.offsets)
        return replaced(self, rows=self.rows.advanced(record, real, n_tokens), past=self.past.advanced(real))

    def with_block(self, keys: mx.array, values: mx.array) -> tuple["Held", View]:
        """With keys [B,H,S,D] and values [B,H,S,D_v] taken in, and what their queries may attend to.

        Raises ValueError when the block does not fit what is held.
        """
        self.refuse_waiting()
        checks.block_dimensions(keys, values)
        if not self.rows.offsets:
            raise ValueError("no sequence is left in this batch, so it takes no tokens; extend it first")
        record = self._begun(keys, values) if self.rows.record is None else self.rows.record
        if self.rows.record is not None:
            key_dtype, value_dtype = record.store.dtypes
            keys, values = keys.astype(key_dtype), values.astype(value_dtype)
        self._check_batch(record, keys)
        n_tokens = keys.shape[2]
        real, padding = self.rows.real_tokens(n_tokens), self.rows.padding_first(n_tokens)
        keys, values = padding_last(keys, padding), padding_last(values, padding)
        valid: Any = None if min(real) == n_tokens else mx.array(real, mx.int32)
        past, waiting = self.past, None
        if record.store.span is not None:  # boundaries are known on the host
            valid = None if valid is None else real
            past = past.before(self.rows)
        if self._observation is not None:
            record, view = self._observation.land(record, keys, values, valid)
            waiting = _Waiting(valid, padding)
        else:
            record, view = self.method.update(record, keys, values, valid=valid)
        rows = self.rows.advanced(record, real, n_tokens)
        return replaced(self, rows=rows, past=past.advanced(real), waiting=waiting), shown(view, record.store.widths)

    def observed(self, queries: Queries, scale: float, sinks: mx.array | None, others: Mapping[str, Any]) -> "Held":
        """With the block that waits scored by its queries. ValueError for `others`, terms of a softmax not ours."""
        if self.waiting is None or self.method.observation is None:
            return self
        if others:
            raise ValueError(
                f"this model's attention takes {', '.join(map(repr, others))} into its softmax, which "
                f"{self.method.name} does not compute again; use queries='proxy', or a method that needs no queries"
            )
        record = self.method.observation.observe(self.rows.record, queries, scale, self.waiting.valid, sinks)
        return replace(self, rows=replace(self.rows, record=record), waiting=None)

    @property
    def _observation(self) -> Observation[Any] | None:
        """What scores each block by the model's queries, for which it waits."""
        return self.method.observation if self.true_queries else None

    def refuse_waiting(self) -> None:
        """Raise MissingQueriesError where a block still waits for its queries."""
        if self.waiting is not None:
            raise MissingQueriesError(
                f"{self.method.name} was set to score by the model's own queries, but the last block's queries never "
                "came. Either the query tap is not installed on this model: use install(), or queries='proxy'. Or an "
                "exception cut the model's call short: go on from a copy or file made before it, or from the prompt"
            )

    def mask(self, n_tokens: int, *, as_array: bool) -> mx.array | str | None:
        """The mask for the next tokens: None, "causal", or a bool array. See `masks`."""
        return mask_of_next(self.rows, n_tokens, self.method.ready, as_array=as_array)

    def every_row(self) -> View:
        """Keys and values of all tokens, in order. ValueError before the first, and once rows were evicted."""
        if self.rows.record is None:
            raise ValueError("this cache has no view: call update_and_fetch first")
        if has_evicted(self.rows):
            raise ValueError(
                "the view of the last call is gone, since the cache's state was read or changed, and some of its rows "
                "were evicted; read it between update_and_fetch and that"
            )
        store = self.rows.store
        return shown((cut(store.keys, 0, store.filled), cut(store.values, 0, store.filled)), self.widths)

    def _begun(self, keys: mx.array, values: mx.array) -> Any:
        record = self.method.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        check_state(record, self.method.name, keys.shape[0])
        own = self.rows.pinned
        return pinned_by_sequence(record, own * keys.shape[0] if len(own) == 1 else own)

    def _check_batch(self, record: Any, keys: mx.array) -> None:
        if not self.rows.batched:
            return
        n_sequences, rollback = len(self.rows.offsets), rollback_of(self.method)
        if keys.shape[0] != n_sequences:
            raise ValueError(f"this cache holds a batch of {n_sequences} sequences, got keys for {keys.shape[0]}")
        if rollback and record.store.warming_up:
            raise ValueError(
                f"a batch cannot warm up with rollback={rollback}: its sequences start to evict one by one, and none "
                "could keep rows aside by itself; give the method its filters, or use rollback=0"
            )

    # What becomes of it between calls of the model

    def padded_to_come(self, left: Sequence[int], lengths: Sequence[int] | None) -> "Held":
        """Before a prefill with as much padding on the left of each sequence, or these numbers of real tokens.

        Raises ValueError when there is not one number for each sequence, and for padding on the left at intervals.
        """
        before = self.rows.counts("left_padding", left)
        interval = interval_of(self.method)
        if any(before) and interval > 1:
            raise ValueError(
                f"left_padding={list(before)} cannot work with interval={interval}: calls are cut at the "
                "boundaries of their real tokens, which padding on the left puts at other places in each sequence; "
                "pad on the right and give lengths, as mlx_lm's batch generator does, or use interval=1"
            )
        rows = replace(self.rows, padding=before) if any(before) else self.rows
        if lengths is not None:
            rows = replace(rows, lengths=rows.counts("lengths", lengths))
        return replace(self, rows=rows)

    def scored(self) -> "Held":
        """With a rank on every row, which an update may put off."""
        self.refuse_waiting()
        if self.rows.record is None:
            return self
        return replace(self, rows=replace(self.rows, record=self.method.scored(self.rows.record)))

    def back(self, n_tokens: int) -> "Held":
        """As it was `n_tokens` tokens ago. ValueError beyond what can be taken back."""
        rows, past = self.past.back(self.rows, n_tokens)
        return replace(self, rows=rows, past=past)

    def pinning(self, pinned: Pinned) -> "Held":
        """With these positions of its one sequence pinned. ValueError once tokens have come, or without room."""
        ranges = pinned_ranges(pinned)
        if self.rows.batched or any(self.rows.offsets):
            raise ValueError(
                f"pinned={list(ranges)} comes too late: this cache has seen tokens, some of which may have left; pin "
                "positions of a fresh cache, before its first token and before it joins a batch"
            )
        check_room(self.method, ranges)
        return replace(self, rows=replace(self.rows, pinned=(ranges,)))

    def quantised(self, group_size: int, bits: int) -> "Held":
        """With rows of one width from here on: those that are there are quantised now."""
        method = quantised(self.method, key_bits=bits, value_bits=bits, group_size=group_size)
        held = self.scored()
        past = replace(self.past.of_rows_stored_anew(), method=method)
        rows = held.rows
        if rows.record is not None:
            rows = replace(rows, record=converted(self.method, rows.record, method.widths))
        return replace(held, method=method, rows=rows, past=past)

    def chosen(self, indices: Sequence[int]) -> "Held":
        """Only these sequences of the batch, in this order."""
        held = self.scored()
        return replace(held, rows=selected(held.rows, indices), past=self.past.of_sequences(self.rows, indices))

    def alone(self, index: int) -> "Held":
        """One sequence of the batch, by itself."""
        held = self.scored()
        return replace(held, rows=extracted(held.rows, index), past=self.past.of_sequences(self.rows, [index]))


def batch_of(parts: Sequence[Held]) -> Held:
    """All their sequences as one batch, as the first would go on. ValueError unless method and settings are alike."""
    parts = [part.scored() for part in parts]
    first = parts[0]
    for part in parts:
        if not same_method(first.method, part.method):
            given = [f"{one.method.name} {dict(one.method.settings)}" for one in (first, part)]
            raise ValueError(f"only caches of one method with one set of settings can share a batch, got {given}")
    rows = [part.rows for part in parts]
    snapshots = first.past.snapshots.joined(rows, [part.past.snapshots for part in parts])
    past = replace(first.past, snapshots=snapshots, can_take_back=0)  # a batch holds no rows aside from before
    return replace(first, rows=merged(rows, first.method), past=past)

"""The one adapter between a method of velox_fn and mlx_lm's cache protocol."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx

from velox_cache.caches import accounting
from velox_cache.caches.bounded import BoundedKVCache
from velox_cache.caches.held import Held, batch_of
from velox_cache.caches.mlx_vlm_protocol import memory_profile
from velox_cache.caches.rows_read import queries_over
from velox_cache.caches.sequences import Sequences
from velox_cache.caches.state import pack_state, same_method, unpack_state
from velox_cache.caches.tail import Tail
from velox_cache.caches.trimming import interval_of
from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction, State
from velox_fn.engine.half import Half
from velox_fn.engine.interval import interval_parts
from velox_fn.engine.pinned import Pinned
from velox_fn.engine.records import arrays
from velox_fn.engine.rows import View
from velox_fn.engine.store import Ranges


class EvictingKVCache(BoundedKVCache):
    """The KV cache of one attention layer, bounded by `method`.

    Unbatched it stands for one sequence (or a batch in lockstep) and `offset` is an int; made by `merge` it holds a
    ragged batch and `offset` is int32 [B]. Offsets count tokens seen, not rows, so RoPE stays true after evictions.
    With `true_queries` a method that scores by attention waits after each call for `observe_queries`, which the query
    tap calls; without, the incoming keys stand in for queries. `snapshots` is how many earlier boundaries
    `trim` can go back beyond.
    """

    def __init__(self, method: Eviction, *, true_queries: bool = False, snapshots: int = 0) -> None:
        """Raises ValueError when `method` is no Eviction, or its states are not such as a cache can hold."""
        self._held = Held.nothing(method, true_queries=true_queries, snapshots=snapshots)
        self._view: View | None = None

    @property
    def _held(self) -> Held:
        """All that the cache holds, as one value."""
        return self._last if self._tail is None else self._tail.held

    @_held.setter
    def _held(self, held: Held) -> None:
        room = held.appends
        self._tail = Tail(held, room) if room else None
        self._last = held if self._tail is None else self._tail.before

    # What attention calls

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> View:
        """Take in keys [B,H,S,D] and values [B,H,S,D_v]; what this block's queries may attend to.

        Rows have the dtypes that the cache began with, as in mlx_lm's own: a block of others is cast (a bfloat16 model
        that read an image's float32 embeddings goes on in float32).

        Raises ValueError when the block does not fit what is cached, which then stays as it was.
        """
        self._start_last_view()
        view = None if self._tail is None else self._tail.append(keys, values)
        if view is None:
            self._held, view = self._held.with_block(keys, values)
        self._view = view
        return view

    def observe_queries(
        self,
        output: mx.array,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        *,
        sinks: mx.array | None = None,
        mask: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        """Score the last block by its queries [B,H_q,S,D]; the attention output, tied to what follows from it.

        keys and values are what attention read: the last view, or what the model made of it, row for row. sinks [H_q]:
        the model's learned attention sinks. mask: numbers that it adds to the logits, such as the rotary part of
        latent attention. others: what else enters its softmax, by name.
        Does nothing when the method does not wait for queries, or when attention read other rows.

        Raises ValueError for any other term of the softmax, without which the scores would be those of another model.
        """
        waiting = self._last.waiting
        if waiting is None or self._view is None:
            return output
        queries, mask = waiting.in_order(queries), waiting.in_order(mask)
        over = queries_over(self._view, self._last.widths, queries, keys, values, mask)
        if over is None:
            return output
        self._held = self._held.observed(over, scale, sinks, others)
        tied: mx.array = mx.depends([output], arrays(self.record))[0]
        return tied

    def keys_and_values(self) -> View:
        """The last view again, for layers that share another layer's cache.

        Reading `state` lets go of the view. While nothing was evicted it can be had again; afterwards ValueError.
        """
        return self._held.every_row() if self._view is None else self._view

    @property
    def bits(self) -> int:
        """Bits of the rows that the last view shows quantised, where keys and values have one width; absent otherwise.

        mlx_lm's attention looks for it and then reads the view by itself, so that no query tap is needed.
        """
        one_width = self._last.widths.one_width
        packed = self._view is not None and isinstance(self._view[0], tuple)
        if not packed or one_width is None:
            raise AttributeError("the last view shows no rows that are quantised in one width")
        return one_width[0]

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale, where keys and values are quantised in one width; absent otherwise."""
        one_width = self._last.widths.one_width
        if one_width is None:
            raise AttributeError("the rows of this cache are not quantised in one width")
        return one_width[1]

    @property
    def keys(self) -> Half | None:
        """The keys as they lie in memory; None before the first token.

        Models in a pipeline tie what they send to the next process to it (`cache[-1].keys = mx.depends(...)`).
        """
        return None if self._held.rows.record is None else self._held.rows.store.keys

    @keys.setter
    def keys(self, keys: Half) -> None:
        rows = self._held.rows
        self._set_rows(rows.with_store(dataclasses.replace(rows.store, keys=keys)))

    @property
    def offset(self) -> int | mx.array:
        """Tokens seen: an int, or int32 [B] for a merged batch. Less the padding that is to come before the first."""
        if self._tail is not None:
            return self._tail.offset
        rows = self._held.rows
        if not rows.batched:
            return rows.offsets[0] - sum(rows.padding)
        seen = mx.array(rows.offsets, mx.int32) if rows.record is None else rows.store.offset
        return seen - mx.array(rows.padding, mx.int32) if rows.padding else seen

    def pin(self, pinned: Pinned) -> None:
        """Let the rows at these positions of this sequence never leave, beside those that the method pins.

        pinned: half-open ranges, such as [(0, 120)]: a system prompt, whose length differs from request to request.
        They count in the budget and go with the sequence: into batches, out of them, into copies and files.
        Raises ValueError once tokens have come, and when protected rows would fill the budget.
        """
        self._held = self._held.pinning(pinned)

    @property
    def pinned(self) -> tuple[Ranges, ...]:
        """What `pin` was given, for each sequence of the batch."""
        return self._held.rows.pinned_of_each

    @property
    def interval(self) -> int:
        """Tokens from one boundary, where rows leave, to the next; 1: they leave with every call."""
        return interval_of(self.method)

    def parts(self, n_tokens: int) -> tuple[int, ...]:
        """How the next S tokens must be cut into calls, none of which may cross a boundary: the parts' sizes."""
        if self.interval == 1:
            return (n_tokens,)
        parts = interval_parts(self._held.rows.offsets, self._held.rows.real_tokens(n_tokens), self.interval)
        return (*parts[:-1], n_tokens - sum(parts[:-1]))  # with the padding after the last real token

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for the next N tokens: None, "causal", or a bool array. See `masks`.

        Raises ValueError for a sliding window: such layers keep the cache that the model gives them.
        """
        if window_size is not None:
            raise ValueError(
                f"a sliding window (window_size={window_size}) over evicted rows is not defined; leave this layer its "
                "own cache, as install() does"
            )
        if N == 1 and self._tail is not None:  # its sequences are in step: all rows are for all of them
            return None
        rows = self._held.rows
        if not rows.offsets:
            raise ValueError("no sequence is left in this batch, so it has no mask; extend it first")
        if rows.ragged or min(rows.real_tokens(N)) < N:
            self._held = self._held.scored()
        return self._held.mask(N, as_array=return_array)

    # What mlx_lm's generation, batching and server call

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything needed to go on: a JSON header, then arrays as they are. Valid at any time."""
        held = self._held
        held.refuse_waiting()
        self._view = None
        return pack_state(held.method, held.rows, held.true_queries, held.past.can_take_back)

    @state.setter
    def state(self, packed: Sequence[Any]) -> None:
        method, rows, true_queries, can_take_back = unpack_state(packed)
        if hasattr(self, "_held") and not same_method(self.method, method):
            raise ValueError(
                f"this cache runs {self.method.name} {dict(self.method.settings)}; the state given was made by "
                f"{method.name} {dict(method.settings)}; use from_state, which takes the method from the state"
            )
        EvictingKVCache.__init__(self, method, true_queries=true_queries)
        past = dataclasses.replace(self._held.past, can_take_back=can_take_back)
        self._held = dataclasses.replace(self._held, rows=rows, past=past)

    def size(self) -> int:
        """Rows kept."""
        return self._held.rows.kept

    def empty(self) -> bool:
        return self._held.rows.record is None

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, preallocated room and the landing row included."""
        return accounting.held_bytes((self._held.rows, *self._held.past.snapshots.states))

    def is_trimmable(self) -> bool:
        """Whether `trim` is exact: nothing was evicted yet, or the method keeps rows aside for a rollback.

        mlx_lm asks a fresh cache before speculative decoding: only a rollback keeps the promise that a yes would be.
        """
        return self._held.past.can_trim(self._held.rows)

    def trim(self, n: int) -> int:
        """Take back the last n tokens; how many were. 0, with nothing changed, when that cannot be exact.

        Raises ValueError beyond what a rollback cache keeps aside, and when n is negative.
        """
        n = checks.whole_number("n", n, 0)
        if self._held.rows.record is None or (self.interval == 1 and not self.is_trimmable()):
            return 0
        n = min(n, min(self._held.rows.offsets))
        self._held, self._view = self._held.back(n), None
        return n

    @property
    def to_quantized(self) -> Callable[..., "EvictingKVCache"]:
        """(group_size=64, bits=4) -> a cache that goes on from here with quantised rows. mlx_lm's `kv_bits` calls it.

        The rows are quantised once, and so are those that come. Absent where they are so already. Raises ValueError
        where the method cannot work on quantised rows, or the group does not divide their width.
        """
        if self._last.widths.packed:
            raise AttributeError("the rows of this cache are quantised already")

        def quantised(group_size: int = 64, bits: int = 4) -> EvictingKVCache:
            cache = copy.copy(self)
            cache._held = self._held.quantised(group_size, bits)
            return cache

        return quantised

    @classmethod
    def merge(cls, caches: Sequence["EvictingKVCache"]) -> Self:
        """One batched cache with a sequence for each of `caches`, in order.

        Raises ValueError when there is none, or when they do not share method and settings.
        """
        if not caches:
            raise ValueError("merge needs at least one cache, got none: a batch takes its method from them")
        _check_evicting(caches)
        return cls._of(batch_of([cache._held for cache in caches]))

    def extend(self, other: "EvictingKVCache") -> None:
        """Add the sequences of `other` to this batch. Raises ValueError unless they share method and settings."""
        _check_evicting([other])
        self._held, self._view = batch_of([self._held, other._held]), None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences of the batch, in this order. Raises ValueError for one that is not there."""
        indices = [self._held.rows.index(f"batch_indices[{i}]", row) for i, row in enumerate(batch_indices)]
        self._held, self._view = self._held.chosen(indices), None

    def extract(self, idx: int) -> Self:
        """Sequence `idx` as an unbatched cache of its own. Raises ValueError for one that is not there."""
        index = self._held.rows.index("idx", idx)
        return self._of(self._held.alone(index))

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a prefill with padding, which is never kept and never attended.

        On the right, with these numbers of real tokens; or on the left, as much before the next token of each sequence,
        whose positions then begin after it: `offset` is negative meanwhile. Raises ValueError when there is not one
        number for each sequence, and for padding on the left at intervals.
        """
        if lengths is None or not any(padding > 0 for padding in right_padding or ()):
            lengths = None
        self._held = self._held.padded_to_come(left_padding or (), lengths)

    def finalize(self) -> None:
        """End of a padded prefill."""
        self._set_rows(dataclasses.replace(self._held.rows, lengths=None, padding=()))

    # What mlx_vlm calls besides: see `mlx_vlm_protocol`

    def memory_profile(self, token_count: int) -> Any:
        """What mlx_vlm reckons with when it stores prefixes; `token_count` tokens were seen."""
        return memory_profile(self._held.rows, self._held.method)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache that goes on by itself; arrays are shared until they differ, since the rows never change in place."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin._held, twin._view = self._held, None
        return twin

    # Accounting

    def __repr__(self) -> str:
        """Method, rows, tokens seen by each sequence, bytes. Nothing waits for the device."""
        budget = self.method.settings.get("budget")
        tokens = " + ".join(map(str, self._held.rows.offsets)) or "0"
        return (
            f"<{type(self).__name__}: {self.method.name}, budget {budget}, {self.size()} rows of {tokens} tokens, "
            f"{self.nbytes:,} bytes>"
        )

    @property
    def method(self) -> Eviction:
        return self._last.method

    @property
    def record(self) -> State | None:
        """The method's own state, for `velox_fn.kv` and `velox_fn.kept_positions`; None before the first token."""
        return self._held.rows.record

    @property
    def tokens_seen(self) -> int:
        """Tokens passed to the first sequence of the batch."""
        return next(iter(self._held.rows.offsets), 0)

    @property
    def tokens_kept(self) -> int:
        """Rows kept for the first sequence of the batch, first head."""
        return accounting.rows_kept(self._held.rows, self.interval)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept rows, and of what the method holds beside them."""
        return accounting.kept_bytes(self._held.rows)

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that the rows of all tokens seen would take."""
        return accounting.full_sequence_bytes(self._held.rows)

    # Parts

    @classmethod
    def _of(cls, held: Held) -> Self:
        cache = cls.__new__(cls)  # named forms are constructed from a config, which is not needed any more
        cache._held, cache._view = held, None
        return cache

    def _set_rows(self, rows: Sequences) -> None:
        self._held = dataclasses.replace(self._held, rows=rows)

    def _start_last_view(self) -> None:
        """Have the last view computed where attention ignored it, and mlx_lm, which evaluates tokens, never would.

        What a step leaves is tied to its view, so no graph grows from step to step. A view that attention read is
        computed or under way, and costs nothing here.
        """
        if self._view is None:
            return
        try:
            mx.async_eval(self._view)  # type: ignore[no-untyped-call]
        except ValueError:  # inside a graph transformation, where nothing may be evaluated
            return


def _check_evicting(caches: Sequence[Any]) -> None:
    for cache in caches:
        if not isinstance(cache, EvictingKVCache):
            kind = f"{type(cache).__module__}.{type(cache).__qualname__}"
            raise ValueError(
                f"only evicting caches can share a batch, got a {kind}, whose rows follow another rule; merge caches "
                "that one model made after install()"
            )

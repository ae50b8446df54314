"""The one adapter between a method of velox_fn and mlx_lm's cache protocol."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import mlx.core as mx

from velox_cache.caches import accounting
from velox_cache.caches.masks import causal_array, ragged_mask
from velox_cache.caches.mlx_vlm_protocol import memory_profile
from velox_cache.caches.packed_rows import shown
from velox_cache.caches.padding import padding_first, padding_last
from velox_cache.caches.rows_read import queries_over
from velox_cache.caches.sequences import Sequences, extracted, merged, selected
from velox_cache.caches.state import pack_state, same_method, unpack_state
from velox_cache.caches.trimming import Past, has_evicted, interval_of, rollback_of
from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction, State, check_state
from velox_fn.engine.half import Half, Widths, cut
from velox_fn.engine.interval import interval_parts
from velox_fn.engine.pinned import Pinned, check_room, pinned_by_sequence, pinned_ranges
from velox_fn.engine.quantised import converted, quantised, widths_of_method
from velox_fn.engine.records import arrays
from velox_fn.engine.rows import View
from velox_fn.engine.store import Ranges


class MissingQueriesError(ValueError):
    """A method that scores by the model's own queries was not shown them."""


@dataclasses.dataclass(frozen=True)
class _Unobserved:
    """A block that is in the cache and waits for its queries."""

    valid: Any
    padding: tuple[int, ...]  # that comes first in the block, per sequence


class EvictingKVCache:
    """The KV cache of one attention layer, bounded by `method`.

    Unbatched it stands for one sequence (or a batch in lockstep) and `offset` is an int; made by `merge` it holds a
    ragged batch and `offset` is int32 [B]. Offsets count tokens seen, not rows, so RoPE stays true after evictions.
    With `true_queries` a method that scores by attention waits after each call for `observe_queries`, which the query
    tap calls; without, the incoming keys stand in for queries.
    """

    def __init__(self, method: Eviction, *, true_queries: bool = False, snapshots: int = 0) -> None:
        """Raises ValueError when `method` is no Eviction, or its states are not such as a cache can hold."""
        _check_method(method)
        self._method = method
        self._true_queries = true_queries and method.observation is not None
        self._past = Past.of(method, checks.whole_number("snapshots", snapshots, 0))
        self._rows = Sequences()
        self._view: View | None = None
        self._unobserved: _Unobserved | None = None

    # What attention calls

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> View:
        """Take in keys [B,H,S,D] and values [B,H,S,D_v]; what this block's queries may attend to.

        Rows have the dtypes that the cache began with, as in mlx_lm's own: a block of others is cast (a bfloat16 model
        that read an image's float32 embeddings goes on in float32).

        Raises ValueError when the block does not fit what is cached, which then stays as it was.
        """
        self._refuse_unobserved()
        checks.block_dimensions(keys, values)
        self._start_last_view()
        rows = self._rows
        if not rows.offsets:
            raise ValueError("no sequence is left in this batch, so it takes no tokens; extend it first")
        if rows.record is None:
            record = self._empty_record(keys, values)
        else:
            record = rows.record
            key_dtype, value_dtype = record.store.dtypes
            keys, values = keys.astype(key_dtype), values.astype(value_dtype)
        if rows.batched and keys.shape[0] != len(rows.offsets):
            raise ValueError(f"this cache holds a batch of {len(rows.offsets)} sequences, got keys for {keys.shape[0]}")
        if rows.batched and rollback_of(self._method) and record.store.warming_up:
            raise ValueError(
                f"a batch cannot warm up with rollback={rollback_of(self._method)}: its sequences start to evict one "
                "by one, and none could keep rows aside by itself; give the method its filters, or use rollback=0"
            )
        n_tokens = keys.shape[2]
        real, padding = rows.real_tokens(n_tokens), rows.padding_first(n_tokens)
        keys, values = padding_last(keys, padding), padding_last(values, padding)
        valid: Any = None if min(real) == n_tokens else mx.array(real, mx.int32)
        if record.store.span is not None:  # boundaries are known on the host
            valid = None if valid is None else real
            self._past = self._past.before(rows)
        observation = self._method.observation
        if self._true_queries and observation is not None:
            record, view = observation.land(record, keys, values, valid)
            self._unobserved = _Unobserved(valid, padding)
        else:
            record, view = self._method.update(record, keys, values, valid=valid)
        self._rows, self._view = rows.advanced(record, real, n_tokens), shown(view, self._widths)
        self._past = self._past.advanced(real)
        return self._view

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
        if self._unobserved is None or self._view is None or self._method.observation is None:
            return output
        waiting = self._unobserved
        queries = padding_last(queries, waiting.padding)
        mask = None if mask is None else padding_last(mask, waiting.padding)
        over = queries_over(self._view, self._widths, queries, keys, values, mask)
        if over is None:
            return output
        if others:
            raise ValueError(
                f"this model's attention takes {', '.join(map(repr, others))} into its softmax, which "
                f"{self._method.name} does not compute again; use queries='proxy', or a method that needs no queries"
            )
        record = self._method.observation.observe(self._rows.record, over, scale, waiting.valid, sinks)
        self._rows, self._unobserved = dataclasses.replace(self._rows, record=record), None
        tied: mx.array = mx.depends([output], arrays(record))[0]
        return tied

    def keys_and_values(self) -> View:
        """The last view again, for layers that share another layer's cache.

        Reading `state` lets go of the view. While nothing was evicted it can be had again; afterwards ValueError.
        """
        if self._view is not None:
            return self._view
        if self._rows.record is None:
            raise ValueError("this cache has no view: call update_and_fetch first")
        store = self._rows.store
        if has_evicted(self._rows):
            raise ValueError(
                "the view of the last call is gone, since the cache's state was read or changed, and some of its rows "
                "were evicted; read it between update_and_fetch and that"
            )
        return shown((cut(store.keys, 0, store.filled), cut(store.values, 0, store.filled)), self._widths)

    @property
    def bits(self) -> int:
        """Bits of the rows that the last view shows quantised, where keys and values have one width; absent otherwise.

        mlx_lm's attention looks for it and then reads the view by itself, so that no query tap is needed.
        """
        widths = self._widths
        packed = self._view is not None and isinstance(self._view[0], tuple)
        if not packed or widths.key_bits is None or widths.key_bits != widths.value_bits:
            raise AttributeError("the last view shows no rows that are quantised in one width")
        return widths.key_bits

    @property
    def group_size(self) -> int:
        """Numbers of a quantised row that share a scale; absent where rows stay as they came."""
        if not self._widths.packed:
            raise AttributeError("the rows of this cache are not quantised")
        return self._widths.group_size

    @property
    def keys(self) -> Half | None:
        """The keys as they lie in memory; None before the first token.

        Models in a pipeline tie what they send to the next rank to it (`cache[-1].keys = mx.depends(...)`).
        """
        return None if self._rows.record is None else self._rows.store.keys

    @keys.setter
    def keys(self, keys: Half) -> None:
        self._rows = self._rows.with_store(dataclasses.replace(self._rows.store, keys=keys))

    @property
    def offset(self) -> int | mx.array:
        """Tokens seen: an int, or int32 [B] for a merged batch. Less the padding that is to come before the first."""
        if not self._rows.batched:
            return self._rows.offsets[0] - sum(self._rows.padding)
        seen = mx.array(self._rows.offsets, mx.int32) if self._rows.record is None else self._rows.store.offset
        return seen - mx.array(self._rows.padding, mx.int32) if self._rows.padding else seen

    def pin(self, pinned: Pinned) -> None:
        """Let the rows at these positions of this sequence never leave, beside those that the method pins.

        pinned: half-open ranges, such as [(0, 120)]: a system prompt, whose length differs from request to request.
        They count in the budget and go with the sequence: into batches, out of them, into copies and files.
        Raises ValueError once tokens have come, and when protected rows would fill the budget.
        """
        ranges = pinned_ranges(pinned)
        if self._rows.batched or any(self._rows.offsets):
            raise ValueError(
                f"pinned={list(ranges)} comes too late: this cache has seen tokens, some of which may have left; pin "
                "positions of a fresh cache, before its first token and before it joins a batch"
            )
        check_room(self._method, ranges)
        self._rows = dataclasses.replace(self._rows, pinned=(ranges,))

    @property
    def pinned(self) -> tuple[Ranges, ...]:
        """What `pin` was given, for each row of the batch."""
        return self._rows.pinned_of_each

    @property
    def interval(self) -> int:
        """Tokens from one boundary, where rows leave, to the next; 1: they leave with every call."""
        return interval_of(self._method)

    def parts(self, n_tokens: int) -> tuple[int, ...]:
        """How the next S tokens must be cut into calls, none of which may cross a boundary: the parts' sizes."""
        if self.interval == 1:
            return (n_tokens,)
        parts = interval_parts(self._rows.offsets, self._rows.real_tokens(n_tokens), self.interval)
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
        real = self._rows.real_tokens(N)
        if not real:
            raise ValueError("no sequence is left in this batch, so it has no mask; extend it first")
        if self._rows.ragged or min(real) < N:
            self._finish_rows()
        rows = self._rows
        if rows.record is not None:
            rows = dataclasses.replace(rows, record=self._method.ready(rows.record))
        if rows.ragged or min(real) < N:
            mask = ragged_mask(None if rows.record is None else rows.store, N, real)
            return padding_first(mask, rows.padding_first(N))
        if N == 1:
            return None
        return causal_array(rows.kept, N) if return_array else "causal"

    # What mlx_lm's generation, batching and server call

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything needed to go on: a JSON header, then arrays as they are. Valid at any time."""
        self._refuse_unobserved()
        self._view = None
        return pack_state(self._method, self._rows, self._true_queries, self._past.can_take_back)

    @state.setter
    def state(self, packed: Sequence[Any]) -> None:
        method, rows, true_queries, can_take_back = unpack_state(packed)
        if hasattr(self, "_method") and not same_method(self._method, method):
            raise ValueError(
                f"this cache runs {self._method.name} {dict(self._method.settings)}; the state given was made by "
                f"{method.name} {dict(method.settings)}; use from_state, which takes the method from the state"
            )
        EvictingKVCache.__init__(self, method, true_queries=true_queries)
        self._rows, self._past = rows, dataclasses.replace(self._past, can_take_back=can_take_back)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Self:
        """A cache that goes on where the one that gave `state` stood."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def size(self) -> int:
        """Rows kept."""
        return self._rows.kept

    def empty(self) -> bool:
        return self._rows.record is None

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, preallocated room and the landing row included."""
        return accounting.held_bytes((self._rows, *self._past.snapshots.states))

    def is_trimmable(self) -> bool:
        """Whether `trim` is exact: nothing was evicted yet, or the method keeps rows aside for a rollback.

        mlx_lm asks a fresh cache before speculative decoding: only a rollback keeps the promise that a yes would be.
        """
        return self._past.can_trim(self._rows)

    def trim(self, n: int) -> int:
        """Take back the last n tokens; how many were. 0, with nothing changed, when that cannot be exact.

        Raises ValueError beyond what a rollback cache keeps aside, and when n is negative.
        """
        n = checks.whole_number("n", n, 0)
        if self._rows.record is None or (self.interval == 1 and not self.is_trimmable()):
            return 0
        n = min(n, min(self._rows.offsets))
        self._rows, self._past = self._past.back(self._rows, n)
        self._view = None
        return n

    @property
    def to_quantized(self) -> Callable[..., "EvictingKVCache"]:
        """(group_size=64, bits=4) -> a cache that goes on from here with quantised rows. mlx_lm's `kv_bits` calls it.

        The rows are quantised once, and so are those that come. Absent where they are so already. Raises ValueError
        where the method cannot work on quantised rows, or the group does not divide their width.
        """
        if self._widths.packed:
            raise AttributeError("the rows of this cache are quantised already")
        return self._to_quantized

    @classmethod
    def merge(cls, caches: Sequence["EvictingKVCache"]) -> Self:
        """One batched cache with a sequence for each of `caches`, in order.

        Raises ValueError when there is none, or when they do not share method and settings.
        """
        if not caches:
            raise ValueError("merge needs at least one cache, got none: a batch takes its method from them")
        _check_evicting(caches)
        batched = cls._of(caches[0]._method, caches[0]._true_queries, caches[0]._past.snapshots.most)
        batched._absorb(caches)
        return batched

    def extend(self, other: "EvictingKVCache") -> None:
        """Add the sequences of `other` to this batch. Raises ValueError unless they share method and settings."""
        _check_evicting([other])
        self._absorb([self, other])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences of the batch, in this order. Raises ValueError for one that is not there."""
        indices = [self._rows.index(f"batch_indices[{i}]", row) for i, row in enumerate(batch_indices)]
        self._finish_rows()
        self._rows, self._view, self._past = selected(self._rows, indices), None, self._past.of_other_rows()

    def extract(self, idx: int) -> Self:
        """Sequence `idx` as an unbatched cache of its own. Raises ValueError for one that is not there."""
        index = self._rows.index("idx", idx)
        self._finish_rows()
        row = self._of(self._method, self._true_queries, self._past.snapshots.most)
        row._rows = extracted(self._rows, index)
        row._past = dataclasses.replace(row._past, can_take_back=self._past.can_take_back)
        return row

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
        before = self._counts("left_padding", left_padding or ())
        if any(before):
            if self.interval > 1:
                raise ValueError(
                    f"left_padding={list(before)} cannot work with interval={self.interval}: calls are cut at the "
                    "boundaries of their real tokens, which padding on the left puts at other places in each sequence; "
                    "pad on the right and give lengths, as mlx_lm's batch generator does, or use interval=1"
                )
            self._rows = dataclasses.replace(self._rows, padding=before)
        if lengths is not None and right_padding is not None and any(padding > 0 for padding in right_padding):
            self._rows = dataclasses.replace(self._rows, lengths=self._counts("lengths", lengths))

    def finalize(self) -> None:
        """End of a padded prefill."""
        self._rows = dataclasses.replace(self._rows, lengths=None, padding=())

    # What mlx_vlm calls besides: see `mlx_vlm_protocol`

    def to_batch(self, left_padding: Sequence[int]) -> Self:
        """A batch of sequences that begin as this one, each after as much padding as its entry says."""
        batch = self.merge([copy.copy(self) for _ in left_padding])
        batch.prepare(left_padding=left_padding)
        return batch

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        """What `prefix_cache_restore` takes: the state."""
        return {"state": self.state}

    def prefix_cache_restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where the cache that gave `snapshot` stood, under its method. Raises ValueError for a damaged one."""
        restored = self.from_state(snapshot["state"])
        self.__dict__.clear()
        self.__dict__.update(restored.__dict__)

    def prefix_cache_merge(self, rows: Sequence[Any], prefix_lens: Sequence[int]) -> Self | None:
        """One batch of single sequences; None where one is no evicting cache, or has not seen its prefix's tokens."""
        seen = [row.offset if isinstance(row, EvictingKVCache) else None for row in rows]
        return self.merge(rows) if seen == list(prefix_lens) else None

    def memory_profile(self, token_count: int) -> Any:
        """What mlx_vlm reckons with when it stores prefixes; `token_count` tokens were seen."""
        return memory_profile(self._rows, self._method)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache that goes on by itself; arrays are shared until they differ, since the rows never change in place."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin._view = None
        return twin

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_state, (self.state,)

    # Accounting

    def __repr__(self) -> str:
        """Method, rows, tokens seen by each sequence, bytes. Nothing waits for the device."""
        budget = self._method.settings.get("budget")
        tokens = " + ".join(map(str, self._rows.offsets)) or "0"
        return (
            f"<{type(self).__name__}: {self._method.name}, budget {budget}, {self.size()} rows of {tokens} tokens, "
            f"{self.nbytes:,} bytes>"
        )

    @property
    def method(self) -> Eviction:
        return self._method

    @property
    def record(self) -> State | None:
        """The method's own state, for `velox_fn.kv` and `velox_fn.kept_positions`; None before the first token."""
        return self._rows.record

    @property
    def tokens_seen(self) -> int:
        """Tokens passed to the first sequence of the batch."""
        return next(iter(self._rows.offsets), 0)

    @property
    def tokens_kept(self) -> int:
        """Rows kept for the first sequence of the batch, first head."""
        return accounting.rows_kept(self._rows, self.interval)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept rows, and of what the method holds beside them."""
        return accounting.kept_bytes(self._rows)

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that the rows of all tokens seen would take."""
        return accounting.full_sequence_bytes(self._rows)

    @property
    def compression_ratio(self) -> float:
        """full_seq_bytes / kept_bytes; 1.0 before the first token."""
        return self.full_seq_bytes / self.kept_bytes if self.kept_bytes else 1.0

    # Parts

    @classmethod
    def _of(cls, method: Eviction, true_queries: bool, snapshots: int) -> Self:
        cache = cls.__new__(cls)  # named forms are constructed from a config, which is not needed any more
        EvictingKVCache.__init__(cache, method, true_queries=true_queries, snapshots=snapshots)
        return cache

    @property
    def _widths(self) -> Widths:
        return widths_of_method(self._method)

    def _counts(self, name: str, given: Sequence[int]) -> tuple[int, ...]:
        """One number for each sequence; () for none. Raises ValueError, naming the argument."""
        if given and len(given) != len(self._rows.offsets):
            raise ValueError(
                f"{name} has {len(given)} entries for a batch of {len(self._rows.offsets)} sequences; give one for each"
            )
        return tuple(checks.whole_number(f"{name}[{i}]", count, 0) for i, count in enumerate(given))

    def _to_quantized(self, group_size: int = 64, bits: int = 4) -> "EvictingKVCache":
        method = quantised(self._method, key_bits=bits, value_bits=bits, group_size=group_size)
        self._finish_rows()
        cache = copy.copy(self)
        cache._method, cache._past = method, dataclasses.replace(self._past.of_other_rows(), method=method)
        if self._rows.record is not None:
            record = converted(self._method, self._rows.record, widths_of_method(method))
            cache._rows = dataclasses.replace(self._rows, record=record)
        return cache

    def _empty_record(self, keys: mx.array, values: mx.array) -> Any:
        record = self._method.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        check_state(record, self._method.name, keys.shape[0])
        own = self._rows.pinned
        return pinned_by_sequence(record, own * keys.shape[0] if len(own) == 1 else own)

    def _absorb(self, caches: Sequence["EvictingKVCache"]) -> None:
        for cache in caches:
            cache._finish_rows()
            if not same_method(caches[0]._method, cache._method):
                given = [f"{one._method.name} {dict(one._method.settings)}" for one in (caches[0], cache)]
                raise ValueError(f"only caches of one method with one set of settings can share a batch, got {given}")
        # A batch holds no rows aside from before.
        self._past = dataclasses.replace(self._past.of_other_rows(), can_take_back=0)
        self._rows, self._view = merged([cache._rows for cache in caches], self._method), None

    def _start_last_view(self) -> None:
        """Have the last view computed where attention ignored it, and mlx_lm, which evaluates tokens, never would.

        What a step leaves is tied to its view, so no graph grows from step to step. A view that attention read is
        computed or under way, and costs nothing here.
        """
        if self._view is not None:
            with contextlib.suppress(ValueError):  # inside a graph transformation, where nothing may be evaluated
                mx.async_eval(*arrays(self._view))  # type: ignore[no-untyped-call]

    def _finish_rows(self) -> None:
        """Make up for what an update puts off, for callers that need every row's rank. Raises as below."""
        self._refuse_unobserved()
        if self._rows.record is not None:
            self._rows = dataclasses.replace(self._rows, record=self._method.scored(self._rows.record))

    def _refuse_unobserved(self) -> None:
        if self._unobserved is not None:
            raise MissingQueriesError(
                f"{self._method.name} was set to score by the model's own queries, but the last block's queries never "
                "came. Either the query tap is not installed on this model: use install(), or queries='proxy'. Or an "
                "exception cut the model's call short: go on from a copy or file made before it, or from the prompt"
            )


def _check_method(method: Eviction) -> None:
    """ValueError unless this is an Eviction that makes states which a cache can hold."""
    if not isinstance(method, Eviction):
        raise ValueError(
            f"EvictingKVCache takes an Eviction, such as velox_fn.qfilters(budget=512) makes, got "
            f"{type(method).__name__}; a name goes to install"
        )
    _ = method.states_fit  # or raises


def _check_evicting(caches: Sequence[Any]) -> None:
    for cache in caches:
        if not isinstance(cache, EvictingKVCache):
            kind = f"{type(cache).__module__}.{type(cache).__qualname__}"
            raise ValueError(
                f"only evicting caches can share a batch, got a {kind}, whose rows follow another rule; merge caches "
                "that one model made after install()"
            )

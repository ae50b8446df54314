"""The one adapter between a method of velox_fn and mlx_lm's cache protocol."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from velox_cache.cache_state import pack_state, same_method, unpack_header, unpack_method, unpack_record
from velox_cache.masks import causal_array, ragged_mask
from velox_fn import batch
from velox_fn.eviction import Eviction, kept_bytes
from velox_fn.records import arrays
from velox_fn.store import Store, View


class MissingQueriesError(ValueError):
    """A method that scores by the model's own queries was not shown them."""


@dataclasses.dataclass(frozen=True)
class _Unobserved:
    """A block that is in the cache and waits for its queries."""

    valid: mx.array | None


class EvictingKVCache:
    """The KV cache of one attention layer, bounded by `method`.

    Unbatched it stands for one sequence (or a batch in lockstep) and `offset` is an int; made by `merge` it holds a
    ragged batch and `offset` is int32 [B]. Offsets count tokens seen, not rows, so RoPE stays true after evictions.
    With `true_queries` a method that scores by attention waits after each call for `observe_queries`, which the query
    tap calls; without, the incoming keys stand in for queries.
    """

    def __init__(self, method: Eviction, *, true_queries: bool = False) -> None:
        self._method = method
        self._true_queries = true_queries and method.observation is not None
        self._state: Any | None = None
        self._offsets: tuple[int, ...] = (0,)
        self._batched = False
        self._lengths: tuple[int, ...] | None = None  # real tokens to come, per row, while a padded prefill runs
        self._view: View | None = None
        self._unobserved: _Unobserved | None = None
        self._can_take_back = method.settings.get("rollback", 0)

    # What attention calls

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> View:
        """Take in keys [B,H,S,D] and values [B,H,S,D_v]; what this block's queries may attend to.

        Raises ValueError when the block does not fit what is cached, which then stays as it was.
        """
        self._refuse_unobserved()
        state = self._state if self._state is not None else self._empty_state(keys, values)
        if self._batched and keys.shape[0] != len(self._offsets):
            raise ValueError(f"this cache holds a batch of {len(self._offsets)} rows, got keys for {keys.shape[0]}")
        n_tokens = keys.shape[2]
        real = self._real_tokens(n_tokens)
        valid = None if all(count == n_tokens for count in real) else mx.array(real, mx.int32)
        if self._true_queries and self._method.observation is not None:
            state, view = self._method.observation.land(state, keys, values, valid)
            self._unobserved = _Unobserved(valid)
        else:
            state, view = self._method.update(state, keys, values, valid=valid)
        self._state, self._view = state, view
        self._offsets = tuple(offset + count for offset, count in zip(self._offsets, real, strict=True))
        if self._lengths is not None:
            self._lengths = tuple(left - count for left, count in zip(self._lengths, real, strict=True))
        self._can_take_back = min(self._can_take_back + n_tokens, self._method.settings.get("rollback", 0))
        return view

    def observe_queries(
        self, output: mx.array, queries: mx.array, keys: mx.array, values: mx.array, scale: float
    ) -> mx.array:
        """Score the last block by its queries [B,H_q,S,D]; the attention output, tied to what follows from it.

        Does nothing when the method does not wait for queries, or when attention read other arrays than the last view.
        """
        if self._unobserved is None or self._view is None or self._method.observation is None:
            return output
        if keys is not self._view[0] or values is not self._view[1]:
            return output
        self._state = self._method.observation.observe(self._state, queries, scale, self._unobserved.valid)
        self._unobserved = None
        tied: mx.array = mx.depends([output], arrays(self._state))[0]
        return tied

    def keys_and_values(self) -> View:
        """The last view again, for layers that share another layer's cache, until `state` is read."""
        if self._view is None:
            raise ValueError("this cache has no view: call update_and_fetch first")
        return self._view

    @property
    def offset(self) -> int | mx.array:
        """Tokens seen: an int, or int32 [B] for a merged batch."""
        if not self._batched:
            return self._offsets[0]
        return mx.array(self._offsets, mx.int32) if self._state is None else self._store.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for the next N tokens: None, "causal", or a bool array. See `masks`.

        Raises ValueError for a sliding window: such layers keep the cache that the model gives them.
        """
        if window_size is not None:
            raise ValueError(
                f"a sliding window (window_size={window_size}) over evicted rows is not defined; leave this layer its "
                "own cache, as install() does"
            )
        real = self._real_tokens(N)
        if self._ragged or any(count != N for count in real):
            return ragged_mask(None if self._state is None else self._store, N, mx.array(real, mx.int32))
        if N == 1:
            return None
        return causal_array(self.size(), N) if return_array else "causal"

    # What mlx_lm's generation, batching and server call

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything needed to go on: a JSON header, then arrays. Valid at any time."""
        self._refuse_unobserved()
        self._view = None
        return pack_state(self._method, self._state, self._offsets, self._batched, self._true_queries)

    @state.setter
    def state(self, packed: Sequence[Any]) -> None:
        header = unpack_header(packed)
        method = unpack_method(header, packed)
        if hasattr(self, "_method") and not same_method(self._method, method):
            raise ValueError(
                f"this cache runs {self._method.name} {dict(self._method.settings)}; the state given was made by "
                f"{method.name} {dict(method.settings)}; use from_state, which takes the method from the state"
            )
        record = unpack_record(method, header, packed)
        EvictingKVCache.__init__(self, method, true_queries=header["true_queries"])
        self._state, self._offsets, self._batched = record, tuple(header["offsets"]), header["batched"]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Self:
        """A cache that goes on where the one that gave `state` stood."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def size(self) -> int:
        """Rows kept."""
        return 0 if self._state is None else min(self._store.filled, self._store.most_kept)

    def empty(self) -> bool:
        return self._state is None

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, preallocated room and the landing row included."""
        return 0 if self._state is None else sum(leaf.nbytes for leaf in arrays(self._state))

    def is_trimmable(self) -> bool:
        """Whether `trim` is exact: nothing was evicted yet, or the method keeps rows aside for a rollback."""
        if not self._method.static or self._state is None:
            return False
        return self._method.settings.get("rollback", 0) > 0 or max(self._offsets) <= self._store.budget

    def trim(self, n: int) -> int:
        """Take back the last n tokens; how many were. 0, with nothing changed, when that cannot be exact.

        Raises ValueError beyond what a rollback cache keeps aside.
        """
        if not self.is_trimmable():
            return 0
        n = min(n, min(self._offsets))
        evicted = max(self._offsets) > self._store.budget
        if evicted and n > self._can_take_back:
            raise ValueError(
                f"cannot take back {n} tokens: rows have been evicted and {self._can_take_back} can be taken back; "
                f"install with rollback={n} or more"
            )
        self._replace_store(batch.trim(dataclasses.replace(self._store, seen_by_all=min(self._offsets)), n))
        self._offsets = tuple(offset - n for offset in self._offsets)
        if evicted:
            self._can_take_back -= n
        self._view = None
        return n

    @classmethod
    def merge(cls, caches: Sequence["EvictingKVCache"]) -> Self:
        """One batched cache with a row for each of `caches`, in order; they must share method and settings."""
        merged = cls._of(caches[0]._method, caches[0]._true_queries)
        merged._batched = True
        merged._absorb(list(caches))
        return merged

    def extend(self, other: "EvictingKVCache") -> None:
        """Add the rows of `other` to this batch."""
        self._absorb([self, other])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these rows of the batch, in this order."""
        self._refuse_unobserved()
        indices = [int(index) for index in batch_indices]
        self._offsets = tuple(self._offsets[index] for index in indices)
        if self._lengths is not None:
            self._lengths = tuple(self._lengths[index] for index in indices)
        self._view = None
        if self._state is None:
            return
        self._state = batch.take(self._state, indices)
        longest = max(batch.real_rows(self._store, offset) for offset in self._offsets)
        if longest < self._store.filled:
            self._replace_store(batch.narrow(self._store, min(longest, self._store.limit), ordered=not self._ragged))

    def extract(self, idx: int) -> "EvictingKVCache":
        """Row `idx` as an unbatched cache of its own."""
        self._refuse_unobserved()
        row = self._of(self._method, self._true_queries)
        row._offsets = (self._offsets[idx],)
        if self._state is None or self._offsets[idx] == 0:
            return row
        row._state = batch.take(self._state, [idx])
        n_rows = min(batch.real_rows(self._store, self._offsets[idx]), self._store.limit)
        row._replace_store(batch.narrow(row._store, n_rows, ordered=True))
        row._know_offsets()
        return row

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a prefill padded on the right, with these numbers of real tokens. Left padding is refused."""
        if left_padding is not None and max(left_padding) > 0:
            raise ValueError(
                f"left_padding={list(left_padding)} is not supported: positions of an evicting cache start at 0 for "
                "every row; pad on the right and give lengths, as mlx_lm's batch generator does"
            )
        if lengths is not None and right_padding is not None and max(right_padding) > 0:
            if len(lengths) != len(self._offsets):
                raise ValueError(f"lengths has {len(lengths)} entries for a batch of {len(self._offsets)} rows")
            self._lengths = tuple(lengths)

    def finalize(self) -> None:
        """End of a padded prefill."""
        self._lengths = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache that goes on by itself; arrays are shared until they differ, since the state never changes."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin._view = None
        return twin

    # Accounting

    @property
    def method(self) -> Eviction:
        return self._method

    @property
    def record(self) -> Any | None:
        """The method's own state, for `velox_fn.kv` and `velox_fn.kept_positions`; None before the first token."""
        return self._state

    @property
    def tokens_seen(self) -> int:
        """Tokens passed to the first row of the batch."""
        return self._offsets[0]

    @property
    def tokens_kept(self) -> int:
        """Rows kept for the first row of the batch, first head."""
        if self._state is None:
            return 0
        return min(batch.real_rows(self._store, self._offsets[0]), self._store.most_kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept rows, and of what the method holds beside them."""
        return 0 if self._state is None else kept_bytes(self._state)

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that the rows of all tokens seen would take."""
        if self._state is None:
            return 0
        keys, values = self._store.keys, self._store.values
        row = keys.shape[1] * (keys.shape[3] * keys.itemsize + values.shape[3] * values.itemsize)
        tokens = sum(self._offsets) if self._batched else self._offsets[0] * keys.shape[0]
        return tokens * row

    @property
    def compression_ratio(self) -> float:
        """full_seq_bytes / kept_bytes; 1.0 before the first token."""
        return self.full_seq_bytes / self.kept_bytes if self.kept_bytes else 1.0

    # Parts

    @classmethod
    def _of(cls, method: Eviction, true_queries: bool) -> Self:
        cache = cls.__new__(cls)
        EvictingKVCache.__init__(cache, method, true_queries=true_queries)
        return cache

    @property
    def _store(self) -> Store:
        if self._state is None:
            raise ValueError("this cache is empty")
        store: Store = self._state.store
        return store

    def _replace_store(self, store: Store) -> None:
        self._state = dataclasses.replace(self._state, store=store)  # type: ignore[type-var]

    def _know_offsets(self) -> None:
        """Tell the record what only the host knows for certain after padded calls."""
        seen = min(self._offsets)
        warm_up = self._store.warm_up if seen < self._store.warm_up else 0
        self._replace_store(dataclasses.replace(self._store, seen_by_all=seen, warm_up=warm_up))

    def _empty_state(self, keys: mx.array, values: mx.array) -> Any:
        if keys.ndim != 4 or values.ndim != 4:
            raise ValueError(
                f"keys must be [B,H,S,D] and values [B,H,S,D_v], got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        return self._method.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)

    def _real_tokens(self, n_tokens: int) -> tuple[int, ...]:
        if self._lengths is None:
            return (n_tokens,) * len(self._offsets)
        return tuple(min(max(left, 0), n_tokens) for left in self._lengths)

    @property
    def _ragged(self) -> bool:
        if self._state is None or not self._batched:
            return False
        return any(batch.real_rows(self._store, offset) < self._store.filled for offset in self._offsets)

    def _absorb(self, caches: list["EvictingKVCache"]) -> None:
        for cache in caches:
            cache._refuse_unobserved()
            if not same_method(caches[0]._method, cache._method):
                given = [f"{one._method.name} {dict(one._method.settings)}" for one in (caches[0], cache)]
                raise ValueError(f"only caches of one method with one set of settings can share a batch, got {given}")
        offsets = tuple(offset for cache in caches for offset in cache._offsets)
        filled = [cache._state for cache in caches if cache._state is not None]
        if filled:
            keys, values = filled[0].store.keys, filled[0].store.values
            states = [
                cache._state
                if cache._state is not None
                else self._method.init(len(cache._offsets), keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
                for cache in caches
            ]
            self._state = batch.merge(states)
        lengths = [length for cache in caches for length in cache._lengths or ()]
        self._offsets, self._batched, self._view = offsets, True, None
        self._lengths = tuple(lengths) if len(lengths) == len(offsets) else None
        self._can_take_back = min(cache._can_take_back for cache in caches)
        if filled:
            self._know_offsets()

    def _refuse_unobserved(self) -> None:
        if self._unobserved is not None:
            raise MissingQueriesError(
                f"{self._method.name} was set to score by the model's own queries, but the last block's queries never "
                "came: the query tap is not installed on this model; use install(), or queries='proxy'"
            )

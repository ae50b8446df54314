"""Rows that come one by one, after those of a cache's last call that had more to do than to append."""

from copy import copy

import mlx.core as mx

from velox_cache.caches.held import Held
from velox_fn.engine.rows import View


class Tail:
    """Single tokens written in place after the rows of a held value, which is told of them when it is asked for.

    Such a step is two slices and a count, as in mlx_lm's own cache. `before` is that value without its rows, which are
    here meanwhile and nowhere else: what somebody else holds would be copied.
    """

    __slots__ = ("_end", "_filled", "_fitting", "_keys", "_values", "before")

    def __init__(self, held: Held, room: int) -> None:
        store = held.rows.store
        batch, n_kv_heads = store.ranks.shape[:2]
        self._keys, self._values = copy(store.keys), copy(store.values)  # handles, which writing binds to new arrays
        shapes = (batch, n_kv_heads, 1, store.head_dim), (batch, n_kv_heads, 1, store.value_dim)
        self._fitting = *shapes, *store.dtypes
        self._filled = store.filled
        self._end = store.filled + room
        self.before = held.without_rows()

    @property
    def n_tokens(self) -> int:
        """Those that have come, of each sequence."""
        return self._filled - self.before.rows.store.filled

    @property
    def offset(self) -> int | mx.array:
        """Tokens seen, as `EvictingKVCache.offset` has them."""
        rows = self.before.rows
        if rows.batched:
            return mx.array([offset + self.n_tokens for offset in rows.offsets], mx.int32)
        return rows.offsets[0] + self.n_tokens

    def append(self, keys: mx.array, values: mx.array) -> View | None:
        """The view of one more token; None where there is more to do: its boundary, new room, an error to be told."""
        start = self._filled
        came = keys.shape, values.shape, keys.dtype, values.dtype
        if start == self._end or came != self._fitting:
            return None
        self._filled = stop = start + 1
        self._keys[:, :, start:stop] = keys
        self._values[:, :, start:stop] = values
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    @property
    def held(self) -> Held:
        """The value with the rows that have come, frozen: what comes later does not show in it."""
        return self.before.appended(copy(self._keys), copy(self._values), self.n_tokens)

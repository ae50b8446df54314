"""Decode many caches at once: a batch whose sequences each have a cache of their own, of any method.

Decoding a small model waits for its weights, and one pass over them serves all sequences of a batch. The batches of
mlx_lm and of `EvictingKVCache.merge` have one method. Here each sequence keeps its own cache, which sees what it would
see alone. Only the model's matrix products are shared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.query_tap import observe_queries
from velox_fn.engine.quantised import dequantised

Step = Callable[[Sequence[int] | Sequence[Sequence[int]]], mx.array]
"""(a token for each prompt cache) -> logits float32 [A,V], or (blocks of S tokens) -> [A,S,V]"""


class SideBySideCache:
    """The caches of one layer, one for each sequence of the batch, while tokens go in.

    For single tokens sequences may differ in how many keys they show. The shorter ones are padded, and the mask hides
    the padding. Blocks of several tokens need sequences that show equally many, as those of one group do. The mask is
    made from one layer's cache and used for all layers of its kind. So the caches of a sequence must hold the same
    number of keys in each of these layers.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = list(rows)

    @property
    def offset(self) -> mx.array:
        """Tokens seen, int32 [A]."""
        return mx.array([row.offset for row in self._rows], mx.int32)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Bool [A,1,1,n], True for a sequence's own keys; what one cache makes when all show equally many.

        Raises ValueError for several tokens over unequal caches, or for a window that is narrower than its cache.
        """
        shown = [_keys_shown(row) for row in self._rows]
        if N != 1:
            if min(shown) < max(shown):
                raise ValueError(f"a block of {N} tokens needs caches that show equally many keys, got {shown}")
            mask: mx.array | str | None = self._rows[0].make_mask(N, return_array=return_array, window_size=window_size)
            return mask
        sizes = [getattr(row, "max_size", window_size) for row in self._rows]
        if window_size is not None and any(size != window_size for size in sizes):
            raise ValueError(f"a window of {window_size} over caches of {sizes} rows cannot be shown side by side")
        if min(shown) == max(shown):
            return None
        return (mx.arange(max(shown)) < mx.array(shown)[:, None])[:, None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Give each cache its keys [A,H,S,D] and values [A,H,S,D_v]; what they show, padded, as one batch."""
        views = [_view(row, keys[i : i + 1], values[i : i + 1]) for i, row in enumerate(self._rows)]
        longest = max(view[0].shape[2] for view in views)
        padded_keys, padded_values = ([_padded(view[part], longest) for view in views] for part in (0, 1))
        return mx.concatenate(padded_keys), mx.concatenate(padded_values)

    def observe_queries(
        self, output: mx.array, queries: mx.array, keys: mx.array, values: mx.array, scale: float, **terms: Any
    ) -> mx.array:
        """Show each cache the queries of its sequence, as the query tap would."""
        outputs = []
        for i, row in enumerate(self._rows):
            own = output[i : i + 1]
            if isinstance(row, EvictingKVCache):
                own = row.observe_queries(own, queries[i : i + 1], *row.keys_and_values(), scale, **terms)
            outputs.append(own)
        return mx.concatenate(outputs)


@contextmanager
def side_by_side(model: nn.Module, prompt_caches: Sequence[Sequence[Any]]) -> Iterator[Step]:
    """A function that feeds a token, or a block of tokens, to each of `prompt_caches` and returns the logits.

    Prompt caches that show equally many keys go together in one batch, if all their caches are evicting, plain or
    sliding ones. Otherwise each goes by itself.
    """
    rows = [row for cache in prompt_caches for row in cache]
    together = all(isinstance(row, EvictingKVCache | KVCache | RotatingKVCache) for row in rows)
    groups = _of_equal_length(prompt_caches) if together else [[i] for i in range(len(prompt_caches))]
    stacks: list[list[Any]] = []
    for group in groups:
        layers = list(zip(*(prompt_caches[i] for i in group), strict=True))
        stacks.append([SideBySideCache(layer) if together else layer[0] for layer in layers])
    order = mx.argsort(mx.array([i for group in groups for i in group]))

    def step(tokens: Sequence[int] | Sequence[Sequence[int]]) -> mx.array:
        given = mx.array(list(tokens))
        blocks = given if given.ndim == 2 else given[:, None]
        batches = [blocks[mx.array(group)] for group in groups]
        logits = [model(batch, cache=stack) for batch, stack in zip(batches, stacks, strict=True)]
        found: mx.array = mx.concatenate(logits)[order].astype(mx.float32)
        found = found if given.ndim == 2 else found[:, -1]
        mx.eval(found)
        return found

    with observe_queries(model):
        yield step


def _of_equal_length(prompt_caches: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Indices of prompt caches that show the same numbers of keys: a short one is not padded to a long one's length."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, cache in enumerate(prompt_caches):
        groups.setdefault(tuple(map(_keys_shown, cache)), []).append(i)
    return list(groups.values())


def _keys_shown(cache: Any) -> int:
    """How many keys the cache will show to the next token."""
    if isinstance(cache, EvictingKVCache):
        return cache.size() + 1
    seen: int = cache.offset
    return min(seen + 1, getattr(cache, "max_size", seen + 1))


def _view(cache: Any, key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
    """What the cache shows to one token, in the model's dtype. Quantised rows are read back: widths may differ."""
    dtype = key.dtype
    if (
        isinstance(cache, KVCache) and cache.keys is not None and cache.values is not None
    ):  # it would go on in the wider of two dtypes
        key, value = key.astype(cache.keys.dtype), value.astype(cache.values.dtype)
    keys, values = cache.update_and_fetch(key, value)
    if isinstance(cache, EvictingKVCache) and cache.record is not None:
        keys, values = dequantised(cache.record, (keys, values))
    return keys.astype(dtype), values.astype(dtype)


def _padded(rows: mx.array, length: int) -> mx.array:
    missing = length - rows.shape[2]
    return mx.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else rows

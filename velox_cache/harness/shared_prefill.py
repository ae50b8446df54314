"""One prefill for many caches.

A block attends to all of itself before any row leaves. So when a prompt goes in as one block, its keys, values and
queries are the same for every cache. They are computed once, and each cache then takes them in. The result is that of a
prefill of its own in one block.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.cache_kinds import is_list, with_parts
from velox_cache.introspection.observed_prefill import LayerQueries, observed_prefill, viewed_caches


@dataclass(frozen=True, eq=False)
class SharedPrefill:
    """A block of tokens as the caches of a model met it."""

    n_tokens: int
    calls: tuple[LayerQueries, ...]  # of each plain KV cache, in layer order: queries, and the rows they read
    caches: tuple[Any, ...]  # the model's own, filled

    def in_dtype(self, dtype: mx.Dtype) -> "SharedPrefill":
        """The same, whose plain rows are rounded to `dtype`: caches that it fills go on in it."""

        def rounded(cache: Any) -> Any:
            if not isinstance(cache, KVCache):
                return cache
            cache = _plain(cache)
            cache.keys, cache.values = cache.keys.astype(dtype), cache.values.astype(dtype)
            return cache

        return replace(self, caches=tuple(with_parts(cache, rounded) for cache in self.caches))

    def into(self, caches: Sequence[Any]) -> list[Any]:
        """Fill fresh caches of one prompt cache with the block; those of other kinds are copies of the model's own.

        Raises ValueError when a cache is not empty, or it cannot be said which of the block's rows are its own.
        """
        calls = {call.layer: call for call in reversed(self.calls)}  # the first of layers that share a cache
        filled = [
            self._filled(cache, own, calls.get(i))
            for i, (cache, own) in enumerate(zip(caches, self.caches, strict=True))
        ]
        mx.eval([cache.state for cache in filled])
        return filled

    def _filled(self, cache: Any, own: Any, call: LayerQueries | None) -> Any:
        if is_list(cache):
            return type(cache)(*(self._filled(*pair, call) for pair in zip(cache.caches, own.caches, strict=True)))
        if not isinstance(cache, EvictingKVCache):
            return copy.deepcopy(own)
        if not cache.empty():
            raise ValueError("a shared prefill fills fresh caches only; make new ones")
        if call is None or call.queries.shape[2] != self.n_tokens:
            raise ValueError("the query tap did not see this layer's attention; prefill each cache by itself")
        view = cache.update_and_fetch(own.keys[..., : self.n_tokens, :], own.values[..., : self.n_tokens, :])
        cache.observe_queries(view[0], call.queries, *view, call.scale, **call.terms)
        return cache


def shared_prefill(
    model: nn.Module, tokens: Sequence[int], *, advance: Callable[[int], object] = lambda n_tokens: None
) -> SharedPrefill:
    """Run `tokens` through `model` in one block, with the model's own caches.

    Holds the queries, keys and values of all layers. `advance` is called with the tokens done: layer by layer, each
    counting for its share of them. Raises ValueError when there is no token, or when the model's
    queries cannot be observed.
    """
    if not tokens:
        raise ValueError("there is nothing to prefill: give at least one token")
    caches = viewed_caches(model)
    calls: list[LayerQueries] = []
    for block in observed_prefill(model, tokens, len(tokens), caches=caches):
        calls.extend(block)
        for done, call in enumerate(block):
            mx.eval(call.queries, call.keys, call.values)
            advance((done + 1) * len(tokens) // len(block) - done * len(tokens) // len(block))
    if not calls:
        advance(len(tokens))
    return SharedPrefill(len(tokens), tuple(calls), tuple(with_parts(cache, _plain) for cache in caches))


def _plain(cache: Any) -> Any:
    """The same cache without the memory of its last view, so that copies of it are plain ones."""
    if not isinstance(cache, KVCache):
        return cache
    plain = KVCache()
    plain.keys, plain.values, plain.offset = cache.keys, cache.values, cache.offset
    return plain

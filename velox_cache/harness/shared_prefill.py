"""One prefill for many caches.

The model reads a text once, with its own caches. Their rows, and the queries that read them, then go into each evicting
cache, in blocks as mlx_lm's prefill cuts them. A block attends to all of itself before any row leaves, so a text that
fits one block leaves every cache as a prefill of its own would. After the first block a cache gets the rows of the full
cache, not those that its own evictions would have led to: the choice of rows is compared, not its echo in later rows.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from velox_cache.caches.bounded import BoundedKVCache
from velox_cache.introspection.cache_kinds import is_list, with_parts
from velox_cache.introspection.observed_prefill import LayerQueries, forked_caches, observed_prefill, viewed_caches
from velox_cache.introspection.query_tap import flat_caches
from velox_fn.engine.checks import whole_number

_ROWS, _QUERIES = "rows.safetensors", "queries.safetensors"


@dataclass(frozen=True, eq=False)
class SharedPrefill:
    """A text as the caches of a model met it."""

    n_tokens: int
    calls: tuple[LayerQueries, ...]  # of each plain KV cache, in layer order: all its queries, and the rows they read
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

    def into(self, caches: Sequence[Any], *, start: int = 0, stop: int | None = None, block: int = 0) -> list[Any]:
        """Fill caches of one prompt cache, which hold `start` tokens, up to `stop`, in blocks of `block` (0: one).

        Those of other kinds are copies of the model's own, with all tokens. Raises ValueError when a cache does not
        hold `start` tokens, or the rows cannot be told for one.
        """
        stop = self.n_tokens if stop is None else stop
        ends = [*range(start + block, stop, block)] if block else []
        ends += [stop] if stop > start else []
        calls = {call.layer: call for call in reversed(self.calls)}  # the first of layers that share a cache
        filled = list(caches)
        for begin, end in zip([start, *ends[:-1]][: len(ends)], ends, strict=True):
            filled = [
                self._filled(cache, own, calls.get(i), begin, end)
                for i, (cache, own) in enumerate(zip(filled, self.caches, strict=True))
            ]
            mx.eval([cache.state for cache in filled])
        return filled

    def extended(self, model: nn.Module, tokens: Sequence[int]) -> "SharedPrefill":
        """The same after more tokens, read in one block from a copy of the model's own caches."""
        caches = self.own_caches()
        (calls,) = observed_prefill(model, tokens, len(tokens), caches=caches)
        before = {call.layer: call.queries for call in reversed(self.calls)}
        own = [replace(call, queries=mx.concatenate([before[call.layer], call.queries], axis=2)) for call in calls]
        mx.eval([call.queries for call in own], [cache.state for cache in caches])
        return SharedPrefill(self.n_tokens + len(tokens), tuple(own), _plain_caches(caches))

    def own_caches(self) -> list[Any]:
        """Copies of the model's own caches that go on by themselves, for `observed_prefill` too."""
        return forked_caches(self.caches)

    def save(self, folder: Path) -> None:
        """Write everything to a new folder, which appears whole or not at all."""
        part = folder.with_name(f"{folder.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        save_prompt_cache(str(part / _ROWS), list(self.caches))
        arrays: dict[str, mx.array] = {}
        about = []
        for i, call in enumerate(self.calls):
            about.append({"layer": call.layer, "scale": call.scale})
            arrays |= {f"{i}.queries": call.queries} | {f"{i}.terms.{name}": term for name, term in call.terms.items()}
        mx.save_safetensors(str(part / _QUERIES), arrays, {"n_tokens": str(self.n_tokens), "calls": json.dumps(about)})
        part.rename(folder)

    @classmethod
    def load(cls, folder: Path) -> "SharedPrefill":
        """What `save` wrote. Arrays are read when they are used, and not before."""
        caches = tuple(load_prompt_cache(str(folder / _ROWS)))
        loaded: Any = mx.load(str(folder / _QUERIES), return_metadata=True)
        arrays, about = loaded
        calls = []
        for i, call in enumerate(json.loads(about["calls"])):
            own = flat_caches([caches[call["layer"]]])[0]
            prefix = f"{i}.terms."
            terms = {name.removeprefix(prefix): term for name, term in arrays.items() if name.startswith(prefix)}
            calls.append(
                LayerQueries(call["layer"], arrays[f"{i}.queries"], own.keys, own.values, call["scale"], terms)
            )
        return cls(int(about["n_tokens"]), tuple(calls), caches)

    def _filled(self, cache: Any, own: Any, call: LayerQueries | None, start: int, stop: int) -> Any:
        if is_list(cache):
            pairs = zip(cache.caches, own.caches, strict=True)
            return type(cache)(*(self._filled(*pair, call, start, stop) for pair in pairs))
        if not isinstance(cache, BoundedKVCache):
            return copy.deepcopy(own)
        if cache.tokens_seen != start:
            raise ValueError(
                f"a shared prefill goes on where a cache stands: this one has seen {cache.tokens_seen} tokens, not "
                f"{start}; make new ones"
            )
        if call is None or call.queries.shape[2] != self.n_tokens:
            raise ValueError("the query tap did not see this layer's attention; prefill each cache by itself")
        part = slice(start, stop)
        keys, values = cache.update_and_fetch(own.keys[..., part, :], own.values[..., part, :])
        cache.observe_queries(keys, call.queries[:, :, part], keys, values, call.scale, **call.terms)
        return cache


def shared_prefill(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    block: int = 0,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> SharedPrefill:
    """Run `tokens` through `model` in blocks of `block` (0: one), with the model's own caches.

    Holds the queries, keys and values of all layers. `advance` is called with the tokens done: in one block layer by
    layer, each counting for its share of them. Raises ValueError when there is no token, or when the model's queries
    cannot be observed, or not cut into blocks.
    """
    if not tokens:
        raise ValueError("there is nothing to prefill: give at least one token")
    block = whole_number("block", block, 0)
    caches = viewed_caches(model)
    blocks: list[list[LayerQueries]] = []
    for calls in observed_prefill(model, tokens, block or len(tokens), caches=caches):
        n_tokens = min(block or len(tokens), len(tokens) - len(blocks) * block)
        for done, call in enumerate(calls):
            mx.eval(call.queries, call.keys, call.values)
            advance((done + 1) * n_tokens // len(calls) - done * n_tokens // len(calls))
        if not calls:
            advance(n_tokens)
        if blocks and any("mask" in call.terms for call in calls):
            raise ValueError(
                "this model's attention adds numbers to its logits (latent attention, for one), which this prefill "
                "cannot keep for several blocks; use block=0"
            )
        blocks.append(calls)
    whole = [
        replace(parts[-1], queries=mx.concatenate([part.queries for part in parts], axis=2))
        for parts in zip(*blocks, strict=True)
    ]
    mx.eval([call.queries for call in whole])
    return SharedPrefill(len(tokens), tuple(whole), _plain_caches(caches))


def _plain_caches(caches: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(with_parts(cache, _plain) for cache in caches)


def _plain(cache: Any) -> Any:
    """The same cache without the memory of its last view, so that copies of it are plain ones."""
    if not isinstance(cache, KVCache):
        return cache
    plain = KVCache()
    plain.keys, plain.values, plain.offset = cache.keys, cache.values, cache.offset
    return plain

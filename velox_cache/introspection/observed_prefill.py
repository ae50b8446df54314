"""Run tokens through a model and see the queries that read each of its plain KV caches."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from velox_cache.introspection.cache_kinds import is_list, is_plain, with_parts
from velox_cache.introspection.latents import latent_attentions, over_latents
from velox_cache.introspection.plan import check_one_attention_a_layer, plain_caches
from velox_cache.introspection.probing import left_as_it_was
from velox_cache.introspection.query_tap import ObservedAttention, flat_caches, observe_queries


@dataclass(frozen=True, eq=False)
class LayerQueries:
    """One block's queries of one layer, and the keys and values they read."""

    layer: int  # index in the prompt cache
    queries: mx.array  # [1, H_q, S, D], after RoPE
    keys: mx.array  # [1, H, n, D]
    values: mx.array  # [1, H, n, D_v]
    scale: float
    # What else enters the softmax, by name: `sinks` [H_q]; numbers added to the logits [.., S, n] as `mask`
    terms: Mapping[str, Any] = field(default_factory=dict)


def cache_layout(model: nn.Module) -> tuple[str, ...]:
    """The class names of the caches that the model makes by itself, one per layer."""
    return tuple(_name(cache) for cache in plain_caches(model))


def viewed_caches(model: nn.Module) -> list[Any]:
    """Empty caches of the model's own kind for `observed_prefill` to fill."""
    return [with_parts(cache, viewed) for cache in plain_caches(model)]


def forked_caches(caches: Sequence[Any]) -> list[Any]:
    """Copies of filled caches, the plain ones such as `observed_prefill` goes on with; arrays are shared."""
    return [with_parts(copy.deepcopy(cache), viewed) for cache in caches]


def observed_prefill(
    model: nn.Module, tokens: Sequence[int], prefill_step_size: int = 512, *, caches: Sequence[Any] | None = None
) -> Iterator[list[LayerQueries]]:
    """Run `tokens` through `model` from an empty cache; per block of `prefill_step_size` yield its layers' queries.

    The caches are the model's own kind, also when evicting caches are installed on it. Layers without a plain KVCache
    (sliding, chunked, recurrent) are left out, and so is attention that does not read what its cache returned. Layers
    that share one cache are both reported under it. Queries of latent attention are those over the latents, which
    stand in the place of keys, with the rotary part of their logits as a term. Arrays are lazy; logits are never
    computed.

    `caches`, made by `viewed_caches` or `forked_caches`, are filled on the way, for a caller who goes on with them.

    Raises ValueError when the model computes attention without mlx_lm's function, or a layer has several attentions.
    """
    check_one_attention_a_layer(model)
    caches = viewed_caches(model) if caches is None else caches
    layer_of = {id(cache): layer for layer, entry in enumerate(caches) for cache in flat_caches([entry])}
    attention_of = _latent_attention_of(model, caches)
    with left_as_it_was(model):
        for start in range(0, len(tokens), prefill_step_size):
            block: list[LayerQueries] = []

            def keep(call: ObservedAttention, block: list[LayerQueries] = block) -> None:
                if not isinstance(call.cache, _ViewedKVCache) or call.cache.view is None:
                    return
                layer, attention = layer_of[id(call.cache)], attention_of.get(id(call.cache))
                if attention is not None:
                    queries, terms = over_latents(attention, call, call.cache.view)
                    block.append(LayerQueries(layer, queries, *call.cache.view, call.scale, terms))
                elif call.cache.is_read_by(call):
                    block.append(LayerQueries(layer, call.queries, call.keys, call.values, call.scale, call.terms))

            with observe_queries(model, keep, caches=caches):
                model(mx.array([list(tokens[start : start + prefill_step_size])]), cache=caches)
            yield block
            mx.eval([cache.state for cache in caches])


class _ViewedKVCache(KVCache):
    """A KVCache that remembers what it last gave to attention."""

    view: tuple[mx.array, mx.array] | None = None

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        self.view = super().keys_and_values()
        return self.view

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.view = super().update_and_fetch(keys, values)
        return self.view

    def is_read_by(self, call: ObservedAttention) -> bool:
        """Whether attention read this cache's rows. Some models cast them first, hence shapes and not identity."""
        return self.view is not None and (call.keys.shape, call.values.shape) == tuple(x.shape for x in self.view)


def _latent_attention_of(model: nn.Module, caches: Sequence[Any]) -> Mapping[int, nn.Module]:
    """The latent attention that fills each viewed cache, by the cache's id; none where caches mirror each other."""
    viewed = [id(cache) for cache in flat_caches(caches) if isinstance(cache, _ViewedKVCache)]
    attentions = latent_attentions(model)
    return dict(zip(viewed, attentions, strict=True)) if len(viewed) == len(attentions) else {}


def viewed(cache: Any) -> Any:
    """A plain cache as one that `observed_prefill` fills, with its rows; others as they are."""
    if not is_plain(cache):
        return cache
    same = _ViewedKVCache()
    same.keys, same.values, same.offset = cache.keys, cache.values, cache.offset
    return same


def _name(cache: Any) -> str:
    inside = f"({', '.join(map(_name, cache.caches))})" if is_list(cache) else ""
    return type(cache).__name__ + inside

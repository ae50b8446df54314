"""How much each layer of a model changes what it is given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.installation.own_calls import call_as_given, call_by
from velox_cache.introspection.observed_prefill import viewed_caches
from velox_cache.introspection.query_tap import flat_caches

_WATCHED = "watched_call"


def layer_similarities(model: nn.Module, tokens: Sequence[int]) -> Mapping[int, float]:
    """The cosine similarity of a layer's input and output, averaged over `tokens`, by index in the prompt cache.

    The model reads them once, from empty caches of its own kind. Layers without a cache are left out; of layers that
    share one, the first counts.
    """
    caches = viewed_caches(model)
    entry_of = {id(part): entry for entry, cache in enumerate(caches) for part in (cache, *flat_caches([cache]))}
    found: dict[int, mx.array] = {}

    def watching(given: type[nn.Module]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = given.__call__(self, *args, **kwargs)
            arguments = [*args, *kwargs.values()]
            after = result[0] if isinstance(result, tuple) else result
            before = next(x for x in arguments if isinstance(x, mx.array) and x.shape == after.shape)
            for entry in (entry_of[id(value)] for value in arguments if id(value) in entry_of):
                found.setdefault(entry, _cosine(before, after))
            return result

        return call

    layers = [layer for layer in model.layers if isinstance(layer, nn.Module)]
    for layer in layers:
        call_by(layer, _WATCHED, watching)
    try:
        model(mx.array([list(tokens)]), cache=caches)
    finally:
        for layer in layers:
            call_as_given(layer, _WATCHED)
    return {entry: float(np.array(similarity)) for entry, similarity in found.items()}


def _cosine(before: mx.array, after: mx.array) -> mx.array:
    """Of rows [B,S,D], averaged."""
    one, other = before.astype(mx.float32), after.astype(mx.float32)
    sizes = mx.linalg.norm(one, axis=-1) * mx.linalg.norm(other, axis=-1)
    similarity: mx.array = ((one * other).sum(-1) / mx.maximum(sizes, 1e-20)).mean()
    return similarity

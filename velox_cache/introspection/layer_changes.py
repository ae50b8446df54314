"""How much each layer of a model changes what it is given."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.observed_prefill import viewed_caches
from velox_cache.introspection.query_tap import flat_caches
from velox_cache.introspection.swapped_calls import Call, swap_back, swap_call


def layer_similarities(model: nn.Module, tokens: Sequence[int]) -> Mapping[int, float]:
    """The cosine similarity of a layer's input and output, averaged over `tokens`, by index in the prompt cache.

    The model reads them once, from empty caches of its own kind. Layers without a cache are left out; of layers that
    share one, the first counts.
    """
    caches = viewed_caches(model)
    entry_of = {id(part): entry for entry, cache in enumerate(caches) for part in (cache, *flat_caches([cache]))}
    found: dict[int, mx.array] = {}

    def watching(call: Call) -> Call:
        def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = call(self, *args, **kwargs)
            given = [*args, *kwargs.values()]
            after = result[0] if isinstance(result, tuple) else result
            before = next(x for x in given if isinstance(x, mx.array) and x.shape == after.shape)
            for entry in (entry_of[id(value)] for value in given if id(value) in entry_of):
                found.setdefault(entry, _cosine(before, after))
            return result

        return watched

    layers = [layer for layer in model.layers if isinstance(layer, nn.Module)]
    for layer in layers:
        swap_call(layer, "watched", watching)
    try:
        model(mx.array([list(tokens)]), cache=caches)
    finally:
        for layer in layers:
            swap_back(layer, "watched")
    return dict(zip(found, mx.stack(list(found.values())).tolist(), strict=True)) if found else {}


def _cosine(before: mx.array, after: mx.array) -> mx.array:
    """Of rows [B,S,D], averaged."""
    one, other = before.astype(mx.float32), after.astype(mx.float32)
    sizes = mx.linalg.norm(one, axis=-1) * mx.linalg.norm(other, axis=-1)
    similarity: mx.array = ((one * other).sum(-1) / mx.maximum(sizes, 1e-20)).mean()
    return similarity

"""How much each layer of a model changes what it is given."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.introspection.observed_prefill import viewed_caches
from velox_cache.introspection.own_calls import layers_of
from velox_cache.introspection.watched_calls import cache_entries, entries_read, stream_input, watched


def layer_similarities(model: nn.Module, tokens: Sequence[int]) -> Mapping[int, float]:
    """The cosine similarity of a layer's input and output, averaged over `tokens`, by index in the prompt cache.

    The model reads them once, from empty caches of its own kind. Layers without a cache are left out; of layers that
    share one, the first counts.
    """
    caches = viewed_caches(model)
    entry_of = cache_entries(caches)
    found: dict[int, mx.array] = {}

    def seen(layer: nn.Module, arguments: Sequence[Any], result: mx.array) -> None:
        for entry in entries_read(entry_of, arguments):
            found.setdefault(entry, _cosine(stream_input(arguments, result), result))

    with watched(layers_of(model), seen):
        model(mx.array([list(tokens)]), cache=caches)
    return {entry: float(np.array(similarity)) for entry, similarity in found.items()}


def _cosine(before: mx.array, after: mx.array) -> mx.array:
    """The cosine similarity of vectors [B,S,D], averaged over batch and tokens."""
    one, other = before.astype(mx.float32), after.astype(mx.float32)
    sizes = mx.linalg.norm(one, axis=-1) * mx.linalg.norm(other, axis=-1)
    similarity: mx.array = ((one * other).sum(-1) / mx.maximum(sizes, 1e-20)).mean()
    return similarity

"""How much each layer of a model changes what it is given, and how much of that is its attention's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.introspection.observed_prefill import viewed_caches
from velox_cache.introspection.own_calls import call_as_given, call_by, layers_of
from velox_cache.introspection.query_tap import flat_caches

_WATCHED = "watched_call"


def layer_similarities(model: nn.Module, tokens: Sequence[int]) -> Mapping[int, float]:
    """The cosine similarity of a layer's input and output, averaged over `tokens`, by index in the prompt cache.

    The model reads them once, from empty caches of its own kind. Layers without a cache are left out; of layers that
    share one, the first counts.
    """
    caches = viewed_caches(model)
    entry_of = _entries(caches)
    found: dict[int, mx.array] = {}

    def seen(layer: nn.Module, arguments: Sequence[Any], result: mx.array) -> None:
        for entry in _read(entry_of, arguments):
            found.setdefault(entry, _cosine(_input(arguments, result), result))

    with _watched(layers_of(model), seen):
        model(mx.array([list(tokens)]), cache=caches)
    return {entry: float(np.array(similarity)) for entry, similarity in found.items()}


@contextmanager
def attention_sizes(model: nn.Module, caches: Sequence[Any]) -> Iterator[dict[int, mx.array]]:
    """Of calls of `model` with these caches inside the `with`: by index in the prompt cache float32 [2], the mean
    squares of what a layer's attention adds to its input, and of that input, summed over the calls.

    Attention is what a layer hands its cache to, and what it adds is what comes out, or what a norm makes of it that
    gets it as it is. Layers that are not so made are left out.
    """
    entry_of = _entries(caches)
    found: dict[int, mx.array] = {}
    added: dict[int, mx.array] = {}

    def part_seen(part: nn.Module, arguments: Sequence[Any], result: mx.array) -> None:
        for entry in _read(entry_of, arguments):
            added[entry] = result
        for entry, given in list(added.items()):
            if arguments and arguments[0] is given:
                added[entry] = result

    def layer_seen(layer: nn.Module, arguments: Sequence[Any], result: mx.array) -> None:
        for entry in _read(entry_of, arguments):
            part = added.pop(entry, None)
            if part is not None and part.shape == result.shape:
                squares = (mx.square(x.astype(mx.float32)).mean() for x in (part, _input(arguments, result)))
                found[entry] = found.get(entry, mx.zeros(2)) + mx.stack(list(squares))

    layers = layers_of(model)
    parts = [part for layer in layers for part in layer.children().values() if isinstance(part, nn.Module)]
    with _watched(parts, part_seen), _watched(layers, layer_seen):
        yield found


@contextmanager
def _watched(
    modules: Sequence[nn.Module], seen: Callable[[nn.Module, Sequence[Any], mx.array], None]
) -> Iterator[None]:
    """Have `seen` told of every call of these modules: its arguments, and its result, the first where it has more."""

    def watching(given: type[nn.Module]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = given.__call__(self, *args, **kwargs)
            seen(self, [*args, *kwargs.values()], result[0] if isinstance(result, tuple) else result)
            return result

        return call

    for module in modules:
        call_by(module, _WATCHED, watching)
    try:
        yield
    finally:
        for module in modules:
            call_as_given(module, _WATCHED)


def _entries(caches: Sequence[Any]) -> Mapping[int, int]:
    """The index in the prompt cache of each cache, and of those inside it, by id."""
    return {id(part): entry for entry, cache in enumerate(caches) for part in (cache, *flat_caches([cache]))}


def _read(entry_of: Mapping[int, int], arguments: Sequence[Any]) -> list[int]:
    return [entry_of[id(value)] for value in arguments if id(value) in entry_of]


def _input(arguments: Sequence[Any], result: mx.array) -> mx.array:
    return next(value for value in arguments if isinstance(value, mx.array) and value.shape == result.shape)


def _cosine(before: mx.array, after: mx.array) -> mx.array:
    """The cosine similarity of vectors [B,S,D], averaged over batch and tokens."""
    one, other = before.astype(mx.float32), after.astype(mx.float32)
    sizes = mx.linalg.norm(one, axis=-1) * mx.linalg.norm(other, axis=-1)
    similarity: mx.array = ((one * other).sum(-1) / mx.maximum(sizes, 1e-20)).mean()
    return similarity

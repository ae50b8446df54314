"""What each layer of a model makes of what its attention read: the projection, a norm after it, and the sum."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.own_calls import layers_of
from velox_cache.introspection.watched_calls import cache_entries, entries_read, stream_input, watched


@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """One call of a layer's attention."""

    projection: nn.Module  # the matrix that attention ends with
    given: mx.array  # [B, S, H_q D_v], what that was given: what the heads read, under a gate if there is one
    squares: mx.array  # float32 [3], mean squares of attention's result, of what is added, and of what it is added to
    width: int  # of the residual stream


@contextmanager
def attention_outputs(model: nn.Module, caches: Sequence[Any]) -> Iterator[dict[int, list[AttentionOutput]]]:
    """Calls of `model` with these caches inside the `with`: what each attention put out, by index in the prompt cache.

    Attention is the innermost module that gets a layer's cache, and what is added is its result, or what a norm makes
    of that which gets it as it is. The projection is the module with a matrix of weights whose result attention returns
    as it is, whatever its name, and quantised, adapted or sharded too. Layers that are not so made are left out.
    """
    entry_of = cache_entries(caches)
    found: dict[int, list[AttentionOutput]] = {}
    projected: dict[int, tuple[nn.Module, mx.array, mx.array]] = {}  # by id of the result, which is held, too
    returned: dict[int, mx.array] = {}
    added: dict[int, mx.array] = {}

    def part_seen(part: nn.Module, arguments: Sequence[Any], result: mx.array) -> None:
        if _has_matrix(part):
            projected[id(result)] = part, arguments[0], result
        for entry in entries_read(entry_of, arguments):
            added.setdefault(entry, returned.setdefault(entry, result))
        for entry, given in list(added.items()):
            if arguments and arguments[0] is given:
                added[entry] = result

    def layer_seen(layer: nn.Module, arguments: Sequence[Any], result: mx.array) -> None:
        for entry in entries_read(entry_of, arguments):
            whole, part = returned.pop(entry, None), added.pop(entry, None)
            if whole is not None and part is not None and part.shape == result.shape and id(whole) in projected:
                parts = (whole, part, stream_input(arguments, result))
                squares = mx.stack([mx.square(x.astype(mx.float32)).mean() for x in parts])
                projection, given, _ = projected[id(whole)]
                found.setdefault(entry, []).append(AttentionOutput(projection, given, squares, result.shape[-1]))
        projected.clear()

    layers = layers_of(model)
    parts = [part for layer in layers for part in layer.modules() if part is not layer]
    with watched(parts, part_seen), watched(layers, layer_seen):
        yield found


def _has_matrix(module: nn.Module) -> bool:
    return any(isinstance(weights, mx.array) and weights.ndim == 2 for weights in module.values())

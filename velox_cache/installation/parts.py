"""Calls of a model whose caches evict at intervals, taken apart where they cross a boundary.

A cache answers a call with one view for all its tokens, and past a boundary tokens see fewer rows than before it. So
the model is called once for each part between boundaries, with what a part of the tokens needs of every argument, and
the outputs are put together. Nothing changes for a call that crosses no boundary, such as any call of one token.
"""

import inspect
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.own_calls import call_as_given, call_by
from velox_cache.introspection.query_tap import row_caches

_WHOLE = "whole_call"


def call_in_parts(model: nn.Module) -> None:
    """Have calls of `model` taken apart at the boundaries of the caches that they are given."""
    call_by(model, _WHOLE, _in_parts)


def call_whole(model: nn.Module) -> None:
    """Undo `call_in_parts`. Does nothing when it was not called."""
    call_as_given(model, _WHOLE)


def _in_parts(whole: type[nn.Module]) -> Callable[..., Any]:
    """The call of `whole`, taken apart."""
    signature = inspect.signature(whole.__call__)
    itself = next(iter(signature.parameters))

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments[itself]
        tokens, cache = next(iter(arguments.values())), _at_intervals(arguments.get("cache"))
        n_tokens = tokens.shape[1] if tokens.ndim > 1 else 1
        parts = (n_tokens,) if cache is None or n_tokens == 1 else cache.parts(n_tokens)
        if len(parts) == 1:
            return whole.__call__(self, *args, **kwargs)
        outputs = []
        for start, stop in pairwise(accumulate(parts, initial=0)):
            of_part = {name: _part(name, value, n_tokens, start, stop) for name, value in arguments.items()}
            outputs.append(whole.__call__(self, **of_part))
        return mx.concatenate(outputs, axis=1)

    return call


def _at_intervals(cache: Any) -> EvictingKVCache | None:
    """The first cache that evicts at intervals; all of a model have the same tokens and boundaries."""
    found = row_caches(cache) if cache else []
    return next((one for one in found if isinstance(one, EvictingKVCache) and one.interval > 1), None)


def _part(name: str, value: Any, n_tokens: int, start: int, stop: int) -> Any:
    """What of an argument belongs to these of the call's tokens."""
    if not isinstance(value, mx.array):
        return value
    if value.ndim < 2 or value.shape[1] != n_tokens or name == "mask":
        raise ValueError(
            f"this call of {n_tokens} tokens crosses a boundary of its caches, and {name}, an array of shape "
            f"{tuple(value.shape)}, cannot be taken apart with them; call the model with parts that end on boundaries "
            "(velox_fn.interval_parts gives them), or install with interval=1"
        )
    return value[:, start:stop]

"""Calls of a model's modules, watched for a while: what each was given, and what it made of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.own_calls import call_as_given, call_by
from velox_cache.introspection.query_tap import flat_caches

_WATCHED = "watched_call"


@contextmanager
def watched(modules: Sequence[nn.Module], seen: Callable[[nn.Module, Sequence[Any], mx.array], None]) -> Iterator[None]:
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


def cache_entries(caches: Sequence[Any]) -> Mapping[int, int]:
    """The index in the prompt cache of each cache, and of those inside it that attention reads, by id."""
    inside = {id(part): entry for entry, cache in enumerate(caches) for part in flat_caches([cache]) if _is_read(part)}
    return {**{id(cache): entry for entry, cache in enumerate(caches)}, **inside}


def entries_read(entry_of: Mapping[int, int], arguments: Sequence[Any]) -> list[int]:
    """The entries whose caches are among the arguments of a call."""
    return [entry_of[id(value)] for value in arguments if id(value) in entry_of]


def stream_input(arguments: Sequence[Any], result: mx.array) -> mx.array:
    """What a layer was given of the residual stream, of its arguments and its result."""
    return next(value for value in arguments if isinstance(value, mx.array) and value.shape == result.shape)


def _is_read(cache: Any) -> bool:
    return hasattr(cache, "update_and_fetch")  # a recurrent state beside it, in the same layer, is not

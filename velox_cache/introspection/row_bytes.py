"""What one token takes in each layer's cache, seen in one call that computes nothing."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.cache_kinds import is_plain, parts
from velox_cache.introspection.plan import plain_caches
from velox_cache.introspection.probing import left_as_it_was
from velox_fn.engine.half import AS_THEY_CAME
from velox_fn.engine.records import arrays
from velox_fn.engine.storage import Storage

Stored = Sequence[tuple[Sequence[int] | None, Storage]]
"""Heads of a layer (None: all), and how their rows are stored, for each part of it."""

_AS_THEY_CAME: Stored = ((None, AS_THEY_CAME),)


def row_bytes(model: nn.Module, stored: Mapping[int, Stored] = MappingProxyType({})) -> tuple[int | None, ...]:
    """Bytes of one token's keys and values of one sequence, for each entry of the model's prompt cache.

    stored: how the rows of an entry are stored, where not as they come. 0 for layers without a plain full-attention
    cache; None where it cannot be told. The model is called on one token and its result dropped: MLX evaluates nothing,
    so that weights which are not loaded yet stay so.
    """
    caches = plain_caches(model)
    try:
        with left_as_it_was(model):
            model(mx.array([[0]]), cache=caches)
    except Exception:  # whatever it is, the caller's own first call says it better
        return (None,) * len(caches)
    return tuple(
        sum(_bytes(part, stored.get(i, _AS_THEY_CAME)) for part in parts(cache) if is_plain(part))
        for i, cache in enumerate(caches)
    )


def _bytes(cache: Any, stored: Stored) -> int:
    if cache.keys is None:  # a layer that reads another layer's rows
        return 0
    halves = tuple(
        storage.stored(*(half if heads is None else half[:, list(heads)] for half in (cache.keys, cache.values)))
        for heads, storage in stored
    )
    return sum(array.nbytes // array.shape[2] for array in arrays(halves))

"""What one token takes in each layer's cache, seen in one call that computes nothing."""

from collections.abc import Mapping
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


def row_bytes(model: nn.Module, widths: Mapping[int, Storage] = MappingProxyType({})) -> tuple[int | None, ...]:
    """Bytes of one token's keys and values of one sequence, for each entry of the model's prompt cache.

    widths: how the rows of an entry are stored, where not as they come. 0 for layers without a plain full-attention
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
        sum(_bytes(part, widths.get(i, AS_THEY_CAME)) for part in parts(cache) if is_plain(part))
        for i, cache in enumerate(caches)
    )


def _bytes(cache: Any, widths: Storage) -> int:
    if cache.keys is None:  # a layer that reads another layer's rows
        return 0
    return sum(array.nbytes // array.shape[2] for array in arrays(widths.stored(cache.keys, cache.values)))

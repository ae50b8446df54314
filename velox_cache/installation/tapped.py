"""Whether calls of the model show its queries."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.held import MissingQueriesError
from velox_cache.installation.installed import InstalledCaches
from velox_cache.introspection.probing import left_as_it_was
from velox_cache.introspection.query_tap import model_type, row_caches


def check_shows_queries(model: nn.Module, installed: InstalledCaches) -> None:
    """ValueError, with the tap removed, unless a call of the model shows every bounded layer its queries."""
    try:
        caches = installed()
        with left_as_it_was(model):
            model(mx.array([[0, 1]]), cache=caches)
        unseen = [entry.layer for entry, cache in zip(installed.plan, caches, strict=True) if not _observed(cache)]
        if unseen:
            raise ValueError(
                f"model type {model_type(model)!r} does the attention of layers {unseen} by hand, or over "
                "arrays that their caches did not return, where its queries cannot be seen; use queries='proxy', or a "
                "method that needs no queries, such as qfilters"
            )
    except BaseException:
        if installed.tap is not None:
            installed.tap.remove()
        raise


def _observed(cache: Any) -> bool:
    try:
        for part in row_caches([cache]):
            _ = part.state if isinstance(part, EvictingKVCache) else None  # nothing is evaluated
    except MissingQueriesError:
        return False
    return True

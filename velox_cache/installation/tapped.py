"""What is seen of the model's calls: its queries, and the masks of a batch with budgets per layer."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.held import MissingQueriesError
from velox_cache.installation.installed import InstalledCaches
from velox_cache.installation.layer_budgets import (
    LayerBudgetKVCache,
    SoloKVCache,
    takes_own_masks,
)
from velox_cache.introspection.query_tap import QueryTap, flat_caches, model_type


def with_own_masks(model: nn.Module, installed: InstalledCaches) -> InstalledCaches:
    """The same with caches for budgets per layer, and the tap that a batch of them needs where the model takes it."""
    batching = replace(installed, cache_class=LayerBudgetKVCache)
    try:
        batching = replace(batching, tap=installed.tap or QueryTap(model).install())
    except ValueError:
        return replace(installed, cache_class=SoloKVCache)
    if takes_own_masks(model, batching):
        return batching
    if installed.tap is None and batching.tap is not None:
        batching.tap.remove()
    return replace(installed, cache_class=SoloKVCache)


def check_shows_queries(model: nn.Module, installed: InstalledCaches) -> None:
    """ValueError, with the tap removed, unless a call of the model shows every bounded layer its queries."""
    try:
        caches = installed()
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
        for part in flat_caches([cache]):
            _ = part.state if isinstance(part, EvictingKVCache) else None  # nothing is evaluated
    except MissingQueriesError:
        return False
    return True

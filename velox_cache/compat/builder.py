"""From a model and settings to one cache per layer."""

from typing import Any

import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.made_once import check_weights
from velox_cache.calibration.values_read import check_values_read
from velox_cache.compat.config import KVCacheConfig
from velox_cache.compat.curdkv_cache import CurDKVKVCache
from velox_cache.compat.qfilters_cache import QFiltersKVCache
from velox_cache.installation.layer_arguments import layer_arguments
from velox_cache.installation.own_part import part_of_calibration
from velox_cache.introspection.key_layouts import KeyLayouts, check_filter_layout
from velox_cache.introspection.plan import make_caches, plan_layers
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.shard import ModelShard, model_shard
from velox_cache.known_methods import method_named


class KVCacheBuilder:
    """Makes caches; holds nothing."""

    @staticmethod
    def for_model(model: nn.Module, config: KVCacheConfig, calibration: Calibration | None = None) -> list[Any]:
        """Fresh caches for one sequence, one entry per layer, with what the method takes of `calibration`.

        Bounded layers have a `QFiltersKVCache` under Q-Filters, a `CurDKVKVCache` under CurDKV, else an
        `EvictingKVCache`. The others keep the cache that the model makes for them. To have mlx_lm make fresh ones for
        every generation, use `install`. On a model that is spread over several processes each makes its own part.
        Raises ValueError when head_dim or the calibration do not fit the model, or it was made with other weights.
        """
        plan = plan_layers(model)
        shard = model_shard(model)
        ropes, layouts = ModelRopes(model), KeyLayouts(model)
        check_values_read(method_named(config.method), config.settings(), model)
        if calibration is not None:
            check_weights(calibration, model)
        own = None if calibration is None else part_of_calibration(shard, calibration, len(plan))
        return make_caches(model, plan, lambda layer: _layer_cache(model, config, own, layer, shard, ropes, layouts))


def _layer_cache(
    model: nn.Module,
    config: KVCacheConfig,
    calibration: Calibration | None,
    layer: int,
    shard: ModelShard,
    ropes: ModelRopes,
    layouts: KeyLayouts,
) -> EvictingKVCache:
    layout = layouts.of_layer(layer) if config.head_dim is not None else None
    if layout is not None and layout.head_dim != config.head_dim:
        raise ValueError(
            f"head_dim={config.head_dim} does not fit this model: keys of layer {layer} have {layout.head_dim} "
            "dimensions; give that, or leave head_dim out"
        )
    arguments = layer_arguments(
        method_named(config.method), config.settings(), model, layer, calibration, shard, ropes, layouts
    )
    if config.method == "qfilters":
        cache: EvictingKVCache = QFiltersKVCache(config, **arguments)
    elif config.method == "curdkv":
        cache = CurDKVKVCache(config)
    else:
        cache = EvictingKVCache(config.eviction(**arguments))
    check_filter_layout(layouts, layer, cache.method)
    return cache

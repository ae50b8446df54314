"""From a model and settings to one cache per layer."""

from typing import Any

import mlx.nn as nn

from velox_cache.adapter import EvictingKVCache
from velox_cache.config import KVCacheConfig
from velox_cache.plan import check_filter_layout, make_caches, plan_layers
from velox_cache.qfilters_artifact import QFiltersCalibration
from velox_fn.eviction import Eviction


class KVCacheBuilder:
    """Makes caches; holds nothing."""

    @staticmethod
    def for_model(model: nn.Module, config: KVCacheConfig, calibration: QFiltersCalibration | None = None) -> list[Any]:
        """Fresh caches for one sequence, one entry per layer, with the layer's filters of `calibration`.

        Layers that are not bounded keep the cache that the model makes for them. To have mlx_lm make fresh ones for
        every generation, use `install`.
        Raises ValueError when head_dim or the calibration do not fit the model.
        """
        plan = plan_layers(model)
        methods = {
            entry.layer: _layer_method(model, config, calibration, entry.layer) for entry in plan if entry.bounded
        }
        return make_caches(model, plan, lambda layer: EvictingKVCache(methods[layer]))


def _layer_method(
    model: nn.Module, config: KVCacheConfig, calibration: QFiltersCalibration | None, layer: int
) -> Eviction:
    filters = layer_filters(calibration, layer) if calibration is not None else None
    method = config.eviction() if filters is None else config.eviction(filters=filters)
    check_filter_layout(model, layer, method)
    return method


def layer_filters(calibration: QFiltersCalibration, layer: int) -> Any:
    """The filters [H, D] of one layer. Raises ValueError when the calibration has none for it."""
    filters = calibration.filters[layer] if layer < len(calibration.filters) else None
    if filters is None:
        raise ValueError(
            f"the calibration has no filters for layer {layer} (it covers {len(calibration.filters)} layers); it was "
            "made for another model, or for one with other caches: calibrate this model"
        )
    return filters

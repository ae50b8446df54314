"""A calibration with the weights that a search has found, and without them."""

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.fusion_choice import FusionChoice


def with_weights(calibration: Calibration, choice: FusionChoice, weights: Mapping[int, mx.array]) -> Calibration:
    """The calibration with weights float32 [H,T] of the choice's terms, by layer."""
    statistics = [
        None if layer is None else replace(layer, fusion_weights=weights[index])
        for index, layer in enumerate(calibration.statistics)
    ]
    return replace(calibration, statistics=statistics, fusion=choice)


def without_weights(calibration: Calibration) -> Calibration:
    """The calibration as it was before any search: equal weights."""
    statistics = [None if layer is None else replace(layer, fusion_weights=None) for layer in calibration.statistics]
    return replace(calibration, statistics=statistics, fusion=None)

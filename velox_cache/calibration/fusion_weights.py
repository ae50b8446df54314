"""A calibration with the weights that a search has found, without them, and what follows for recent rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.fusion_choice import FusionChoice
from velox_fn.method import Method
from velox_fn.methods.fusion import term_names

RECENT_SHARE = 0.75
"""The share of the budget that `install` protects as recent rows where nothing else is known."""


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


def recent_share(method: Method, settings: Mapping[str, Any], calibration: Calibration | None) -> float:
    """The share of the budget that is protected as recent unless `settings` say otherwise."""
    if method.recent_share is not None:
        return method.recent_share
    if calibration is None or calibration.fusion is None or not method.fuses:
        return RECENT_SHARE
    asked = {**method.defaults, **settings}
    is_searched = calibration.fusion.is_of(term_names(asked["terms"]), asked["combine"])
    return calibration.fusion.recent_share if is_searched else RECENT_SHARE

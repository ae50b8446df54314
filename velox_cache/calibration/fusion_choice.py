"""What a search over the weights of a fusion found, as a calibration carries it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from velox_fn.method import Method
from velox_fn.methods.fusion import term_names

if TYPE_CHECKING:
    from velox_cache.calibration.artifact import QFiltersCalibration

RECENT_SHARE = 0.75
"""The share of the budget that `install` protects as recent rows where nothing else is known."""


@dataclass(frozen=True)
class FusionChoice:
    """The fusion whose weights the layers' statistics hold. It is used where exactly this fusion is asked for."""

    terms: tuple[str, ...]
    combine: str
    recent_share: float  # of the budget

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", term_names(self.terms))
        if not 0 <= self.recent_share < 1:
            raise ValueError(f"recent_share is a share of the budget, from 0 to below 1, got {self.recent_share}")

    def is_of(self, terms: Sequence[str], combine: str) -> bool:
        """Whether a fusion of these terms is the one that was searched."""
        return (self.terms, self.combine) == (tuple(terms), combine)


def with_weights(
    calibration: "QFiltersCalibration", choice: FusionChoice, weights: Mapping[int, mx.array]
) -> "QFiltersCalibration":
    """The calibration with weights float32 [H,T] of the choice's terms, by layer."""
    statistics = [
        None if layer is None else replace(layer, fusion_weights=weights[index])
        for index, layer in enumerate(calibration.statistics)
    ]
    return replace(calibration, statistics=statistics, fusion=choice)


def without_weights(calibration: "QFiltersCalibration") -> "QFiltersCalibration":
    """The calibration as it was before any search: equal weights."""
    statistics = [None if layer is None else replace(layer, fusion_weights=None) for layer in calibration.statistics]
    return replace(calibration, statistics=statistics, fusion=None)


def recent_share(method: Method, settings: Mapping[str, Any], calibration: "QFiltersCalibration | None") -> float:
    """The share of the budget that is protected as recent unless `settings` say otherwise."""
    if calibration is None or calibration.fusion is None or not method.fuses:
        return RECENT_SHARE
    asked = {**method.defaults, **settings}
    is_searched = calibration.fusion.is_of(term_names(asked["terms"]), asked["combine"])
    return calibration.fusion.recent_share if is_searched else RECENT_SHARE

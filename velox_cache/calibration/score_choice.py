"""How the learned scores of a calibration were fitted, as the calibration carries it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TARGETS = ("natural", "repeated")
BLENDS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"natural": (1.0, 0.0), "repeated": (0.0, 1.0), "both": (1.0, 1.0)}
)
"""Weights of TARGETS, each in units of its spread, by name."""
FEATURES = ("keys", "keys+key_squares", "keys+values", "keys+key_squares+values+value_squares")


@dataclass(frozen=True)
class ScoreChoice:
    """How the learned scores of a calibration were fitted."""

    features: str  # one of FEATURES
    ridge: float  # in units of the features' variance
    blend: tuple[float, ...]  # weights of the targets

    def __post_init__(self) -> None:
        object.__setattr__(self, "blend", tuple(self.blend))
        if self.features not in FEATURES or not self.ridge > 0 or len(self.blend) != len(TARGETS):
            raise ValueError(
                f"a learned score is fitted to some of {', '.join(FEATURES)} with a positive ridge and a weight for "
                f"each of {', '.join(TARGETS)}, got {self}"
            )

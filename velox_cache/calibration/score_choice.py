"""How the learned scores of a calibration were fitted, as the calibration carries it."""

from dataclasses import dataclass

FEATURES = ("keys", "keys+key_squares", "keys+values", "keys+key_squares+values+value_squares")


@dataclass(frozen=True)
class ScoreChoice:
    """How the learned scores of a calibration were fitted."""

    features: str  # one of FEATURES
    ridge: float  # in units of the features' variance

    def __post_init__(self) -> None:
        if self.features not in FEATURES or not self.ridge > 0:
            raise ValueError(
                f"a learned score is fitted to some of {', '.join(FEATURES)} with a positive ridge, got {self}"
            )

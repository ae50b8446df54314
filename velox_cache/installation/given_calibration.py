"""The calibration that `install` is given: a record or a file, under either of its names."""

import os

from velox_cache.calibration.artifact import Calibration, load_calibration

GivenCalibration = str | os.PathLike[str] | Calibration


def one_of_both(calibration: GivenCalibration | None, filters: GivenCalibration | None) -> GivenCalibration | None:
    """What was given as `calibration` or as `filters`, the documents' name for it. ValueError when both were."""
    if calibration is not None and filters is not None:
        raise ValueError("calibration and filters are two names for one argument, and both are given; drop filters")
    return filters if calibration is None else calibration


def loaded(given: GivenCalibration | None) -> Calibration | None:
    """The calibration, read from its file where a path was given. ValueError when it is none."""
    if isinstance(given, str | os.PathLike):
        return load_calibration(given)
    if given is not None and not isinstance(given, Calibration):
        raise ValueError(
            f"calibration must be a Calibration or the path of one, got {type(given).__name__}; wrap arrays [H,D], one "
            "per layer, in Calibration(arrays)"
        )
    return given

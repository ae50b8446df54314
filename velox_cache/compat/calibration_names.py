"""A calibration under the names that the project's documents give it."""

from velox_cache.calibration.artifact import Calibration as QFiltersCalibration
from velox_cache.calibration.artifact import load_calibration as load_qfilters
from velox_cache.calibration.artifact import save_calibration as save_qfilters

__all__ = ["QFiltersCalibration", "load_qfilters", "save_qfilters"]

"""Paired differences: two caches on the same prompts, so that the prompts' own difficulty falls out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NORMAL_95 = 1.96


@dataclass(frozen=True)
class PairedDifference:
    """The mean of (one - other) over prompts, with its 95 % interval `mean` ± `margin` (normal approximation)."""

    mean: float
    margin: float  # NaN for a single prompt
    n: int

    def points(self) -> str:
        """In points of a hundred, such as `-12 ± 5`."""
        mean = f"{round(100 * self.mean):+d}"  # a whole number, which has no minus zero
        return mean if math.isnan(self.margin) else f"{mean} ± {100 * self.margin:.0f}"


def paired_difference(one: Sequence[float], other: Sequence[float]) -> PairedDifference:
    """Compare scores prompt by prompt. Raises ValueError unless both hold one score for each of the same prompts."""
    if len(one) != len(other) or not one:
        raise ValueError(f"a pairing needs the same prompts on both sides, got {len(one)} and {len(other)}")
    differences = np.subtract(one, other, dtype=np.float64)
    n = len(differences)
    margin = _NORMAL_95 * float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return PairedDifference(float(differences.mean()), margin, n)

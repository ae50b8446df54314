"""Statistics of arms over the same contexts, with bootstrap intervals: the contexts' own difficulty falls out."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
FEWEST = 4
"""Contexts below which there is no interval: so few say nothing about others."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, whose ends are NaN where there are too few contexts for one."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """`value [low, high]`, or the value alone."""
        if math.isnan(self.low):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def bootstrap(statistic: Callable[..., Floats], *samples: npt.ArrayLike, seed: int = 0) -> Interval:
    """A statistic of samples [..., n], whose last axis are the same n contexts, with its percentile interval.

    Contexts are drawn anew with replacement, the same ones in all samples. statistic: takes the samples with a further
    leading axis of draws, [R,...,n], and gives [R]. The same seed gives the same interval; draws for which the
    statistic is not finite are left out. Raises ValueError unless all samples have the same contexts, at least one.
    """
    arrays = [np.asarray(sample, np.float64) for sample in samples]
    counts = {array.shape[-1] for array in arrays}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"a pairing needs the same contexts on all sides, at least one, got {sorted(counts)}")
    (n,) = counts
    drawn = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    value = float(statistic(*(array[None] for array in arrays))[0])
    found = statistic(*(np.moveaxis(array[..., drawn], -2, 0) for array in arrays))
    finite = found[np.isfinite(found)]
    low, high = np.quantile(finite, [0.025, 0.975]) if finite.size and n >= FEWEST else (np.nan, np.nan)
    return Interval(value, float(low), float(high))


def difference(one: npt.ArrayLike, other: npt.ArrayLike) -> Interval:
    """The mean of (one - other) over contexts [n]."""
    return bootstrap(lambda a, b: (a - b).mean(axis=-1), one, other)


def ratio(one: npt.ArrayLike, other: npt.ArrayLike) -> Interval:
    """mean(one) / mean(other) over contexts [n]; of [budgets, n], the geometric mean of the budgets' ratios."""
    return bootstrap(_ratio, np.atleast_2d(np.asarray(one)), np.atleast_2d(np.asarray(other)))


def mean_ratio(one: npt.ArrayLike, other: npt.ArrayLike) -> Interval:
    """The geometric mean of one / other over all entries, [n] or [budgets, n]: every context weighs the same."""
    return bootstrap(_mean_ratio, np.atleast_2d(np.asarray(one)), np.atleast_2d(np.asarray(other)))


def _mean_ratio(one: Floats, other: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.exp((np.log(one) - np.log(other)).mean(axis=(-2, -1)))
    return found


def _ratio(one: Floats, other: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Floats = np.log(one.mean(axis=-1)) - np.log(other.mean(axis=-1))
    found: Floats = np.exp(logs.mean(axis=-1))
    return found

"""Shares of one total that make the sum of losses smallest."""

from itertools import pairwise
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def least_loss(shares: Floats, losses: Floats, average: float) -> Floats:
    """What each of n gets, float64 [n], `average` in the mean, of what costs it losses [n,S] at ascending shares [S].

    Each gets half of the average at least. Losses are read between the shares as straight lines, on their lower convex
    hulls, so that the best next step is the best of all (a greedy choice, as in LU-KV).
    """
    points = np.concatenate([[average / 2], shares[shares > average / 2]])
    found = np.full(len(losses), average / 2)
    steps = []
    for one, curve in enumerate(losses):
        at = np.interp(points, shares, curve)
        hull = lower_hull(points, at)
        for start, stop in pairwise(hull):
            width = points[stop] - points[start]
            steps.append(((at[stop] - at[start]) / width, one, width))
    left = average / 2 * len(losses)
    for slope, one, width in sorted(steps):
        taken = min(width, left)
        if slope >= 0 or taken <= 0:
            break
        found[one] += taken
        left -= taken
    return found + left / len(found)


def lower_hull(x: Floats, y: Floats) -> list[int]:
    """The indices of the points on the lower convex hull of the curve y [S] over ascending x [S]."""
    hull: list[int] = []
    for point in range(len(x)):
        while len(hull) > 1 and _above(x, y, hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(x: Floats, y: Floats, first: int, middle: int, last: int) -> bool:
    """Whether the middle point is on or above the line between the others."""
    return bool((y[middle] - y[first]) * (x[last] - x[first]) >= (y[last] - y[first]) * (x[middle] - x[first]))

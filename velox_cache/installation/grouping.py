"""Numbers of heads or layers that lie together, in few groups."""

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from velox_cache.installation.least_loss import Floats

_GROUPS = 3


def grouped(numbers: Sequence[float]) -> np.ndarray:
    """Which of three groups each number is in, int [n], from the smallest numbers to the largest; all 0 for three or
    fewer numbers. Squared distances to the groups' means are smallest."""
    n = len(numbers)
    if n <= _GROUPS:
        return np.zeros(n, int)
    order = np.argsort(numbers, kind="stable")
    ascending = np.asarray(numbers, np.float64)[order]

    def scatter(cuts: tuple[int, ...]) -> float:
        return float(sum(((part - part.mean()) ** 2).sum() for part in np.split(ascending, cuts)))

    cuts = min(combinations(range(1, n), _GROUPS - 1), key=scatter)
    groups = np.empty(n, int)
    groups[order] = np.searchsorted(cuts, np.arange(n), side="right")
    return groups


def tier_sizes(wanted: Sequence[Floats], budget: int) -> list[list[int]]:
    """Rows of each head of each layer, at most three sizes in a layer, `budget` in the mean over all heads.

    wanted: of each layer what its heads want, float64 [H], `budget` in the mean over all. A head gets the mean of its
    group (`grouped`, where more than three differ). What rounding leaves goes where it was rounded down most, as far as
    whole groups can take it; groups are rounded the other way where that alone makes the total exact.
    """
    tiers = [(layer, heads) for layer, rows in enumerate(wanted) for heads in _heads_alike(np.round(rows, 6))]
    counts = [len(heads) for _, heads in tiers]
    means = np.array([wanted[layer][heads].mean() for layer, heads in tiers])
    sizes = np.floor(means + 1e-6).astype(int)
    left = budget * sum(counts) - int(sizes @ counts)
    for tier in np.argsort(sizes - means, kind="stable"):
        if counts[tier] <= left:
            sizes[tier] += 1
            left -= counts[tier]
    for step in _fewest_steps(set(counts), left):
        alike = [tier for tier, count in enumerate(counts) if count == abs(step)]
        up = step > 0
        tier = max(alike, key=lambda one: (means[one] - sizes[one]) * (1 if up else -1))
        sizes[tier] += 1 if up else -1
    found = [[0] * len(rows) for rows in wanted]
    for (layer, heads), size in zip(tiers, sizes, strict=True):
        for head in heads:
            found[layer][head] = int(size)
    return found


def _heads_alike(rows: Floats) -> list[list[int]]:
    """The heads of each tier of a layer."""
    groups = np.unique(rows, return_inverse=True)[1]
    if groups.max() >= _GROUPS:
        groups = grouped(rows.tolist())
    return [np.flatnonzero(groups == group).tolist() for group in np.unique(groups)]


def _fewest_steps(counts: Iterable[int], total: int) -> tuple[int, ...]:
    """The fewest of these counts, added or taken away, whose sum is `total`, a multiple of what divides them all."""
    steps = [sign * count for count in counts for sign in (1, -1)]
    most = total + max(map(abs, steps))
    paths: dict[int, tuple[int, ...]] = {0: ()}
    while total not in paths:
        longer = {at + step: (*path, step) for at, path in paths.items() for step in steps if abs(at + step) <= most}
        paths = longer | paths
    return paths[total]

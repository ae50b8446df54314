"""Rows of heads in tiers: few sizes, and the total kept."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_cache.installation.grouping import tier_sizes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**16), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(4, 300))
def test_layers_have_three_sizes_at_most_and_the_total_is_kept(seed: int, heads: list[int], budget: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(1, 9, sum(heads)) if seed % 2 else rng.exponential(size=sum(heads))
    wanted = budget / 2 * (1 + drawn / drawn.mean())
    of_layers = np.split(wanted, np.cumsum(heads)[:-1])
    found = tier_sizes(of_layers, budget)
    assert [len(layer) for layer in found] == heads
    assert sum(map(sum, found)) == budget * sum(heads)
    for layer, asked in zip(found, of_layers, strict=True):
        assert len(set(layer)) <= 3
        # A head that wants more gets no less, and each is near the mean of what its group wants.
        order = np.argsort(asked, kind="stable")
        for size in set(layer):
            group = [own for own, given in zip(asked, layer, strict=True) if given == size]
            assert abs(np.mean(group) - size) < 2.5 * max(heads)
        assert (np.diff(np.array(layer)[order]) >= -2).all()


@pytest.mark.parametrize("seed", range(4))
def test_heads_are_grouped_as_well_as_any_grouping_does(seed: int) -> None:
    wanted = np.random.default_rng(seed).exponential(size=6) * 900
    wanted *= 1000 / wanted.mean()
    [found] = tier_sizes([wanted], 1000)

    def scatter(groups: tuple[int, ...]) -> float:
        each = [wanted[np.array(groups) == group] for group in set(groups)]
        return float(sum(((own - own.mean()) ** 2).sum() for own in each))

    best = min(scatter(groups) for groups in product(range(3), repeat=6))
    assert scatter(tuple(found)) == pytest.approx(best)


def test_few_sizes_stay_as_they_are() -> None:
    wanted = [np.array([64.0, 512, 64]), np.array([128.0, 32, 64]), np.array([102.0])]
    assert tier_sizes(wanted, 138) == [[64, 512, 64], [128, 32, 64], [102]]


def test_heads_that_want_the_same_get_the_same_whatever_rounding_leaves() -> None:
    sizes = tier_sizes([np.array([32.5, 40.3, 32.5, 32.5]), np.array([30.2, 30.2, 40.8, 25.0])], 33)
    assert sizes[0][0] == sizes[0][2] == sizes[0][3]
    assert sizes[1][0] == sizes[1][1]
    assert sum(map(sum, sizes)) == 8 * 33


def test_what_rounding_leaves_may_take_groups_down() -> None:
    """Two groups of two and three heads, and one row too few: only three up and two down is one more."""
    wanted = [np.array([10.2, 10.2]), np.array([11.2, 11.2, 11.2])]
    total = round(sum(map(np.sum, wanted)))
    assert total == 54
    budget = 11  # of 55 rows
    sizes = tier_sizes(wanted, budget)
    exact = [(a, b) for a, b in combinations_with_replacement(range(5, 20), 2) if 2 * a + 3 * b == 5 * budget]
    assert (sizes[0][0], sizes[1][0]) in exact
    assert sum(map(sum, sizes)) == 55

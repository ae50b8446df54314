"""LagKV: each row against the range of the partition that follows its own, as the paper's formula has it."""

import numpy as np
import pytest
from arm_oracle import kept_after, tokens
from oracles import best_positions

from velox_fn import lagkv
from velox_fn.testing import LAYER, the_kept_set_of_a_static_method_does_not_depend_on_the_calls

LAG, N_SINK, BUDGET = 4, 2, 20


def softmax(x):
    raised = np.exp(x - x.max())
    return raised / raised.sum()


def spread(rows, following):
    low, high = following.min(0), following.max(0)
    return softmax(((rows - low) / (high - low)).std(-1, ddof=1))


def lag_scores(keys, values, across):
    """Scores of all tokens of one head; the last ones have none."""
    n_tokens = len(keys)
    scores = np.zeros(n_tokens)
    for start in range(N_SINK, n_tokens - 2 * LAG + 1, LAG):
        here, following = slice(start, start + LAG), slice(start + LAG, start + 2 * LAG)
        both = sum(spread(half[here].astype(np.float64), half[following]) for half in (keys, values))
        scores[here] = both if across else [(both < own - 2**-10 / LAG).sum() for own in both]
    return scores


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("calls", [[67], [1] * 67, [30, 1, 1, 1, 20, 14]], ids=str)
@pytest.mark.parametrize("n_tokens", [67, 66, 61])
def test_rows_that_spread_most_against_the_next_partition_stay(n_tokens, calls, across):
    keys, values, _ = tokens(67)
    keys, values = keys[:, :n_tokens], values[:, :n_tokens]
    calls = [*calls[:-1], calls[-1] - (67 - n_tokens)] if len(calls) < 60 else calls[:n_tokens]
    found = kept_after(lagkv(budget=BUDGET, n_sink=N_SINK, lag=LAG, across=across), keys, values, None, calls)
    for head in range(2):
        scores = lag_scores(keys[head], values[head], across)
        expected = best_positions(
            scores, list(range(n_tokens)), n_tokens, budget=BUDGET, n_sink=N_SINK, recent=2 * LAG - 1
        )
        assert found[head] == expected


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("lag", [1, 3, 5])
def test_the_kept_set_does_not_depend_on_the_calls(lag, across):
    method = lagkv(budget=BUDGET, n_sink=N_SINK, lag=lag, across=across)
    for calls in ([48], [1] * 48, [7, 1, 1, 1, 30, 8], [5, 43]):
        the_kept_set_of_a_static_method_does_not_depend_on_the_calls(method, LAYER, calls, seed=3)


def test_places_give_each_partition_a_like_share():
    keys, values, _ = tokens(120)
    values[:, 40:60] *= 100  # of no consequence to the others' places
    kept = kept_after(lagkv(budget=40, n_sink=0, lag=10), keys, values, None, [120])
    for head in kept:
        shares = np.bincount([at // 10 for at in head if at < 100])
        assert shares.max() - shares.min() <= 1


def test_rounding_of_a_channel_that_does_not_vary_decides_nothing():
    keys, values, _ = tokens(48)
    values[:, 30:40] = values[:, 30:31]  # one token said again and again
    noisy = values * (1 + 1e-6 * np.random.default_rng(4).standard_normal(values.shape).astype(np.float32))
    method = lagkv(budget=BUDGET, n_sink=N_SINK, lag=LAG)
    assert kept_after(method, keys, values, None, [48]) == kept_after(method, keys, noisy, None, [48])


def test_rows_that_differ_by_rounding_share_a_place():
    keys, values, _ = tokens(48)
    rows = slice(N_SINK, N_SINK + LAG)  # a partition that says one token, but for rounding that grows
    keys[:, rows], values[:, rows] = keys[:, :1], values[:, :1] * np.linspace(1, 1 + 1e-5, LAG)[:, None]
    method = lagkv(budget=BUDGET, n_sink=N_SINK, lag=LAG)
    same = np.array(values)
    same[:, rows] = values[:, :1]
    assert kept_after(method, keys, values, None, [48]) == kept_after(method, keys, same, None, [48])


def test_an_eighth_of_the_budget_is_a_partition_unless_told_otherwise():
    assert lagkv(budget=256).settings["lag"] == 32


@pytest.mark.parametrize("setting", [{"lag": 0}, {"budget": 16, "lag": 8}, {"across": 1}])
def test_settings_that_cannot_work_are_refused(setting):
    with pytest.raises(ValueError, match=r"lag|across"):
        lagkv(**setting)

"""KeyDiff keeps keys that differ from the mean key."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, simulated, tokens
from oracles import best_positions

from velox_fn import keydiff


def minus_cosine(keys, mean):
    keys, mean = keys.astype(np.float64), mean.astype(np.float64)
    return -(keys @ mean) / np.linalg.norm(keys, axis=-1) / np.linalg.norm(mean)


@pytest.mark.parametrize("calls", [[40], [25, 1, 1, 13], [1] * 40])
def test_keys_least_like_the_mean_of_the_cache_stay(calls):
    keys, values, _ = tokens(40)
    found = kept_after(keydiff(budget=10, n_sink=2), keys, values, None, calls)
    for head in range(2):

        def score(held, old, block, keys=keys[head]):
            unit = keys[held] / np.linalg.norm(keys[held], axis=-1, keepdims=True)
            return minus_cosine(keys[held], unit.mean(0))

        assert found[head] == simulated(calls, score, budget=10, n_sink=2)


def test_keys_least_like_the_calibrated_mean_stay():
    keys, values, _ = tokens(40)
    mean = np.random.default_rng(5).standard_normal((2, 8)).astype(np.float32)
    found = kept_after(keydiff(budget=10, n_sink=2, mean_keys=mx.array(mean)), keys, values, None, [25, 1, 14])
    for head in range(2):
        scores = minus_cosine(keys[head], mean[head])
        assert found[head] == best_positions(scores, list(range(40)), 40, budget=10, n_sink=2)


def test_a_key_that_is_not_finite_leaves_the_mean_alone():
    keys, values, _ = tokens(30)
    spoiled = keys.copy()
    spoiled[:, 5, 0] = [np.nan, np.inf]
    found = kept_after(keydiff(budget=12, n_sink=0), spoiled, values, None, [30])
    for head in range(2):
        others = np.delete(keys[head], 5, axis=0)
        unit = others / np.linalg.norm(others, axis=-1, keepdims=True)
        scores = np.insert(minus_cosine(others, unit.mean(0)), 5, -np.inf)
        assert found[head] == best_positions(scores, list(range(30)), 30, budget=12)


def test_rollback_needs_a_calibrated_mean():
    with pytest.raises(ValueError, match="mean_keys"):
        keydiff(rollback=2)


def test_mean_keys_of_zeros_are_refused():
    with pytest.raises(ValueError, match="mean_keys holds nothing but zeros"):
        keydiff(mean_keys=mx.zeros((2, 8)))

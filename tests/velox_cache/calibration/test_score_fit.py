"""The learned score's regression, against numpy's least squares over all rows at once."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from velox_cache.calibration.row_worth import AGES, RowWorth
from velox_cache.calibration.score_choice import FEATURES, ScoreChoice
from velox_cache.calibration.score_fit import (
    age_slopes,
    best_choice,
    fitted,
    held_out_correlations,
)
from velox_cache.calibration.score_sums import no_score_sums, with_worth

H, D, D_V, N = 2, 4, 3, 60
ALL = FEATURES[-1]
TRUE = np.random.default_rng(9).standard_normal((H, 2 * (D + D_V)))


def features(block):
    keys, values = np.array(block.keys, np.float64), np.array(block.values, np.float64)
    return np.concatenate([keys, keys**2, values, values**2], -1)


def a_block(seed, noise=0.5, slopes=(0.8, -0.3)):
    rng = np.random.default_rng(seed)
    keys, values = (1 + rng.standard_normal((H, N, width)) for width in (D, D_V))
    rows = np.concatenate([keys, keys**2, values, values**2], -1)
    worth = np.einsum("hnf,hf->hn", rows, TRUE) + seed + noise * rng.standard_normal((H, N))
    middle = np.sqrt(np.multiply(AGES[:-1], AGES[1:]))
    by_age = 7 * middle ** -np.array(slopes)[:, None]
    arrays = (keys, values, worth, by_age, np.full(by_age.shape, 7.0))
    return RowWorth(*(mx.array(array.astype(np.float32)) for array in arrays))


def summed(blocks, held_out=()):
    sums = no_score_sums(H, D, D_V)
    for i, block in enumerate(blocks):
        sums = with_worth(sums, block, held_out=i in held_out)
    return sums


def oracle(blocks, ridge, used):
    """Weights [H,F] of a ridge regression on standardised features, from the rows themselves."""
    rows = np.concatenate([features(t) - features(t).mean(1, keepdims=True) for t in blocks], 1)
    worth = [np.array(t.worth, np.float64) for t in blocks]
    worth = np.concatenate([w - w.mean(1, keepdims=True) for w in worth], 1)
    weights = np.zeros(TRUE.shape)
    for head in range(H):
        x, y = rows[head][:, used], worth[head]
        spread = x.std(0)
        x = np.concatenate([x / spread, np.sqrt(ridge * len(x)) * np.eye(len(spread))])
        weights[head, used] = np.linalg.lstsq(x, np.pad(y, (0, len(spread))), rcond=None)[0] / spread
        predicted = rows[head] @ weights[head]
        weights[head] *= predicted @ worth[head] / (predicted @ predicted)
    return weights


@pytest.mark.parametrize(
    ("names", "used"), [(ALL, range(14)), ("keys", range(4)), ("keys+values", [*range(4), 8, 9, 10])]
)
def test_the_fit_is_the_ridge_regression_over_all_rows(names, used):
    blocks = [a_block(seed) for seed in range(4)]
    found = fitted(summed(blocks, held_out={3}), ScoreChoice(names, 0.1))
    weights = np.concatenate([np.array(array) for name, array in found.items() if name != "score_age"], 1)
    np.testing.assert_allclose(weights, oracle(blocks, 0.1, list(used)), rtol=1e-4, atol=1e-4)
    assert [array.shape for array in found.values()] == [(H, D), (H, D), (H, D_V), (H, D_V), (H,)]


def test_sums_merge_over_blocks():
    blocks = [a_block(seed) for seed in range(4)]
    whole, first, second = summed(blocks, {1, 3}), summed(blocks[:2], {1}), summed(blocks[2:], {1})
    for name in ("gram", "cross", "squares", "by_age", "n_pairs"):
        parts = np.array(getattr(first, name)) + np.array(getattr(second, name))
        np.testing.assert_allclose(np.array(getattr(whole, name)), parts, rtol=1e-12)


def test_correlations_are_those_of_the_blocks_held_out():
    blocks, choice = [a_block(seed) for seed in range(4)], ScoreChoice("keys", 0.1)
    [found] = held_out_correlations({0: summed(blocks, {2})}, choice).values()
    weights = oracle([blocks[0], blocks[1], blocks[3]], 0.1, [0, 1, 2, 3])
    for head in range(H):
        predicted = features(blocks[2])[head] @ weights[head]
        wanted = np.corrcoef(predicted, np.array(blocks[2].worth)[head])[0, 1]
        assert found[head] == pytest.approx(wanted, abs=1e-4)


def test_the_features_that_the_worth_needs_are_chosen():
    blocks = [a_block(seed) for seed in range(4)]
    assert best_choice({0: summed(blocks, {3})}).features == ALL


def test_with_no_block_held_out_a_choice_is_made_all_the_same():
    choice = best_choice({0: summed([a_block(0)])})
    assert np.isfinite(np.array(fitted(summed([a_block(0)]), choice)["score_keys"])).all()


def test_slopes_are_those_of_log_attention_against_log_age_and_never_negative():
    slopes = age_slopes(summed([a_block(0), a_block(1)]))
    np.testing.assert_allclose(slopes, [0.8, 0.0], atol=1e-6)


def test_no_attention_at_any_age_gives_no_slope():
    assert age_slopes(no_score_sums(H, D, D_V)).tolist() == [0, 0]


def test_attention_at_one_age_gives_no_slope():
    sums, one_age = no_score_sums(H, D, D_V), mx.zeros((H, len(AGES) - 1))
    one_age[:, 2] = 0.5
    assert age_slopes(replace(sums, by_age=one_age, n_pairs=4 * one_age)).tolist() == [0, 0]

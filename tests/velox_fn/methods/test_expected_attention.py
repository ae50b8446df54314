"""Expected Attention keeps what future queries are expected to look at."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, simulated, tokens
from oracles import best_positions

from velox_fn import (
    RopeSpec,
    expected_attention,
    kept_positions,
    query_gram_init,
    query_gram_moments,
    query_gram_update,
)

ROPE = RopeSpec(dims=8, base=100.0)


def rotation(position):
    """RoPE's matrix [8,8] at a position: pairs (i, i + 4)."""
    angles = position * 100.0 ** (-np.arange(4) / 4)
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cos, -sin], [sin, cos]])


def log_score(keys, values, mean, covariance):
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    quadratic = np.einsum("ni,ij,nj->n", keys, covariance, keys)
    return keys @ mean + quadratic / 2 + np.log(np.linalg.norm(values, axis=-1))


@pytest.mark.parametrize("rope", [None, ROPE], ids=["as rotated", "before RoPE"])
@pytest.mark.parametrize("calls", [[40], [25, 1, 1, 13], [1] * 40])
def test_rows_of_the_highest_expected_attention_stay(calls, rope):
    keys, values, queries = tokens(40)
    found = kept_after(expected_attention(budget=10, n_sink=2, future=16, rope=rope), keys, values, queries, calls)
    for head in range(2):

        def score(held, old, block, head=head):
            seen = [
                (rotation(-p) if rope else np.eye(8)) @ queries[h, p].astype(np.float64) / np.sqrt(8)
                for h in (2 * head, 2 * head + 1)
                for p in range(2, block[-1] + 1)
            ]
            mean = np.mean(seen, axis=0) if seen else np.zeros(8)
            covariance = np.cov(np.transpose(seen), bias=True) if seen else np.zeros((8, 8))
            ahead = np.mean([rotation(block[-1] + 1 + t) for t in range(16)], axis=0) if rope else np.eye(8)
            return log_score(keys[head][held], values[head][held], ahead @ mean, ahead @ covariance @ ahead.T)

        assert found[head] == simulated(calls, score, budget=10, n_sink=2)


@pytest.fixture
def moments():
    rng = np.random.default_rng(3)
    factors = rng.standard_normal((2, 8, 8)) / 3
    return rng.standard_normal((2, 8)), factors @ factors.swapaxes(1, 2)


def test_rows_of_the_highest_calibrated_expectation_stay(moments):
    keys, values, _ = tokens(300)
    mean, covariance = moments
    method = expected_attention(
        budget=10, n_sink=2, query_mean=mx.array(mean, mx.float32), query_cov=mx.array(covariance, mx.float32)
    )
    found = kept_after(method, keys, values, None, [200, 1, 99])
    for head in range(2):
        scores = log_score(keys[head], values[head], mean[head], covariance[head])
        assert found[head] == best_positions(scores, list(range(300)), 300, budget=10, n_sink=2)


def test_closed_form_is_the_mean_attention_of_normal_queries(moments):
    mean, covariance = moments[0][0] / 4, moments[1][0] / 4
    keys, values, _ = tokens(6)
    drawn = np.random.default_rng(4).multivariate_normal(mean, covariance, size=400_000)
    sampled = np.log(np.exp(drawn @ keys[0].T).mean(0) * np.linalg.norm(values[0], axis=-1))
    np.testing.assert_allclose(log_score(keys[0], values[0], mean, covariance), sampled, atol=0.05)


def test_moments_of_a_group_are_those_of_all_its_queries():
    queries = tokens(50)[2]
    mean, covariance = query_gram_moments(query_gram_update(query_gram_init(4, 8), mx.array(queries)), 2)
    for head in range(2):
        group = queries[2 * head : 2 * head + 2].reshape(-1, 8).astype(np.float64)
        np.testing.assert_allclose(np.array(mean)[head], group.mean(0), atol=1e-6)
        np.testing.assert_allclose(np.array(covariance)[head], np.cov(group.T, bias=True), atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        {"query_mean": mx.zeros((2, 8))},
        {"query_cov": mx.zeros((2, 8, 8))},
        {"query_mean": mx.zeros((2, 8)), "query_cov": mx.zeros((2, 8, 7))},
        {"query_mean": mx.zeros((2, 8)), "query_cov": mx.full((2, 8, 8), mx.inf)},
        {"query_mean": mx.full((2, 8), mx.nan), "query_cov": mx.zeros((2, 8, 8))},
    ],
    ids=["no covariance", "no mean", "another width", "infinite covariance", "NaN mean"],
)
def test_moments_that_cannot_score_are_refused(params):
    with pytest.raises(ValueError, match="query_"):
        expected_attention(**params)


def test_rollback_needs_calibrated_moments():
    with pytest.raises(ValueError, match="query_mean"):
        expected_attention(rollback=2)


def test_a_rotation_of_the_last_dimensions_is_that_of_the_first_in_another_order():
    rope, kept = RopeSpec(dims=4, base=50.0), []
    keys, values, queries = (mx.random.normal((1, 2, 60, 8), key=mx.random.key(i)) for i in range(3))
    for spec, shift in ((rope, 0), (dataclasses.replace(rope, first=4), 4)):
        method = expected_attention(budget=20, n_sink=2, future=64, rope=spec)
        moved = [mx.roll(rows, shift, axis=-1) for rows in (keys, queries)]
        state, _ = method.update(method.init(1, 2, 8), moved[0], values, queries=moved[1])
        kept.append(np.array(kept_positions(state)).tolist())
    assert kept[0] == kept[1]

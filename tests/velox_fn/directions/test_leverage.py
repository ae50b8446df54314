"""Leverage without a singular value decomposition, against one in float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from velox_fn.directions.leverage import leverage_scores


def svd_leverage(weights, values, rank_cap):
    """The definition: s_j^2 U_ij^2 over the leading directions of diag(w) V, normalised."""
    left, s, _ = np.linalg.svd(weights.astype(np.float64)[:, None] * values.astype(np.float64), full_matrices=False)
    energy = (s**2 * left**2)[:, :rank_cap].sum(-1)
    return energy / energy.sum() if energy.sum() > 0 else np.zeros(len(weights))


def assert_exact(weights, values, rank_cap):
    found = leverage_scores(mx.array(weights), mx.array(values), rank_cap)
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), svd_leverage(weights, values, rank_cap), atol=1e-5)


def random_block(n_rows, value_dim, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random(n_rows).astype(np.float32), rng.normal(size=(n_rows, value_dim)).astype(np.float32)


@given(st.integers(1, 40), st.integers(1, 24), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_equals_svd_for_any_shape(n_rows, value_dim, rank_cap, seed):
    weights, values = random_block(n_rows, value_dim, seed)
    s = np.linalg.svd(weights[:, None] * values, compute_uv=False) ** 2
    assume(len(s) <= rank_cap or s[rank_cap - 1] - s[rank_cap] > 0.01 * s[0])  # else the definition leaves it open
    assert_exact(weights, values, rank_cap)


def test_equals_svd_at_the_size_of_a_cache():
    assert_exact(*random_block(512, 128), 16)


@given(st.integers(1, 6), st.integers(1, 8))
def test_equals_svd_for_deficient_rank(rank, rank_cap):
    rng = np.random.default_rng(rank)
    values = (rng.normal(size=(30, rank)) @ rng.normal(size=(rank, 12))).astype(np.float32)
    assert_exact(rng.random(30).astype(np.float32), values, rank_cap)


@pytest.mark.parametrize("n_rows", [3, 10])
def test_equals_svd_with_fewer_rows_than_directions_or_dimensions(n_rows):
    assert_exact(*random_block(n_rows, 32), 5)


def test_equals_svd_with_one_huge_row():
    weights, values = random_block(40, 16)
    values[7] *= 1e6
    assert_exact(weights, values, 4)


def test_a_row_whose_square_overflows_float32_takes_all():
    weights, values = random_block(40, 16)
    values[7] *= 1e30
    found = np.array(leverage_scores(mx.array(weights), mx.array(values), 4))
    np.testing.assert_allclose(found, np.eye(40)[7], atol=1e-6)


def test_tiny_values_do_not_underflow():
    weights, values = random_block(40, 16)
    small = leverage_scores(mx.array(weights), mx.array(values * 1e-25), 4)
    np.testing.assert_allclose(np.array(small), svd_leverage(weights, values, 4), atol=1e-5)


def test_equals_svd_when_singular_values_repeat_within_the_rank():
    # Any basis of the repeated pair's plane gives the same scores; a pair astride the rank would leave them undefined.
    rng = np.random.default_rng(3)
    left = np.linalg.qr(rng.normal(size=(30, 6)))[0]
    right = np.linalg.qr(rng.normal(size=(12, 6)))[0]
    values = (left * [5, 5, 3, 1, 1, 0.5]) @ right.T
    assert_exact(np.ones(30, np.float32), values.astype(np.float32), 3)


def test_zero_block_scores_zero():
    assert mx.array_equal(leverage_scores(mx.ones(9), mx.zeros((9, 4)), 2), mx.zeros(9)).item()


def test_zero_weights_score_zero():
    assert mx.array_equal(leverage_scores(mx.zeros(9), mx.ones((9, 4)), 2), mx.zeros(9)).item()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["value", "weight"])
def test_a_row_that_is_not_finite_scores_zero_and_spares_the_others(bad, where):
    weights, values = random_block(20, 8)
    alone = np.array(leverage_scores(mx.array(np.delete(weights, 5)), mx.array(np.delete(values, 5, axis=0)), 3))
    if where == "value":
        values[5, 2] = bad
    else:
        weights[5] = bad
    found = np.array(leverage_scores(mx.array(weights), mx.array(values), 3))
    np.testing.assert_allclose(found, np.insert(alone, 5, 0.0), atol=1e-6)


def test_heads_and_batches_are_scored_on_their_own():
    rng = np.random.default_rng(4)
    weights = rng.random((2, 3, 20)).astype(np.float32)
    values = rng.normal(size=(2, 3, 20, 8)).astype(np.float32)
    found = np.array(leverage_scores(mx.array(weights), mx.array(values), 3))
    for b in range(2):
        for h in range(3):
            np.testing.assert_allclose(found[b, h], svd_leverage(weights[b, h], values[b, h], 3), atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_values_are_scored_in_float32(dtype):
    weights, values = random_block(30, 8)
    half = mx.array(values).astype(dtype)
    found = leverage_scores(mx.array(weights), half, 3)
    assert found.dtype == mx.float32
    expected = svd_leverage(weights, np.array(half.astype(mx.float32)), 3)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


def test_order_of_rows_does_not_matter():
    weights, values = random_block(30, 8)
    order = np.random.default_rng(5).permutation(30)
    found = np.array(leverage_scores(mx.array(weights), mx.array(values), 3))
    shuffled = np.array(leverage_scores(mx.array(weights[order]), mx.array(values[order]), 3))
    np.testing.assert_allclose(shuffled, found[order], atol=1e-6)


def test_traces_under_compile():
    weights, values = map(mx.array, random_block(30, 8))
    compiled = mx.compile(lambda w, v: leverage_scores(w, v, 3))(weights, values)
    np.testing.assert_allclose(np.array(compiled), np.array(leverage_scores(weights, values, 3)), atol=1e-6)


@pytest.mark.parametrize("rank_cap", [0, -1, 2.0, True])
def test_rank_cap_that_cannot_work_is_refused(rank_cap):
    with pytest.raises(ValueError, match="rank_cap must be"):
        leverage_scores(mx.ones(4), mx.ones((4, 2)), rank_cap)

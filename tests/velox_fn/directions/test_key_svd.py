"""The fallback direction: what it finds, what it cannot, and that it never breaks a generation."""

import mlx.core as mx
import numpy as np
import pytest

from velox_fn.directions.key_svd import estimate_filter_dir
from velox_fn.directions.query_gram import compute_qfilters


def centred_axis(keys: np.ndarray) -> np.ndarray:
    keys = keys.astype(np.float64)
    return np.linalg.svd(keys - keys.mean(0), full_matrices=False)[2][0]


def test_direction_is_the_leading_axis_of_centred_keys():
    rng = np.random.default_rng(0)
    keys = (rng.normal(size=(2, 3, 50, 8)) * np.arange(1, 9) + 5).astype(np.float32)
    found = np.array(estimate_filter_dir(mx.array(keys)))
    for b in range(2):
        for h in range(3):
            assert abs(found[b, h] @ centred_axis(keys[b, h])) == pytest.approx(1, abs=1e-5)


def test_key_svd_loses_a_pure_drift_direction():
    rng = np.random.default_rng(1)
    drift = np.zeros(32)
    drift[3] = 1.0
    rows = (rng.normal(size=(1, 500, 32)) + 8 * drift).astype(np.float32)
    from_keys = np.array(estimate_filter_dir(mx.array(rows)))[0]
    from_queries = np.array(compute_qfilters(mx.array(rows)))[0]
    assert abs(from_keys @ drift) < 0.3
    assert from_queries @ drift > 0.99


def test_sign_is_fixed_by_the_largest_entry():
    found = np.array(estimate_filter_dir(mx.random.normal((20, 30, 8), key=mx.random.key(2))))
    assert np.take_along_axis(found, np.abs(found).argmax(-1, keepdims=True), axis=-1).min() > 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_direction_is_float32_of_unit_norm(dtype):
    keys = mx.random.normal((2, 3, 20, 8), key=mx.random.key(3)).astype(dtype)
    found = estimate_filter_dir(keys)
    assert (found.dtype, found.shape) == (mx.float32, (2, 3, 8))
    np.testing.assert_allclose(np.linalg.norm(np.array(found), axis=-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e5, float("nan"), float("inf")])
def test_keys_without_variation_give_a_finite_unit_vector(value):
    found = np.array(estimate_filter_dir(mx.full((2, 12, 8), value)))
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_left_out(bad):
    keys = np.random.default_rng(4).normal(size=(30, 8)).astype(np.float32)
    spoiled = np.insert(keys, 7, keys[0], axis=0)
    spoiled[7, 2] = bad
    np.testing.assert_allclose(
        np.array(estimate_filter_dir(mx.array(spoiled))), np.array(estimate_filter_dir(mx.array(keys))), atol=1e-6
    )


def test_large_keys_do_not_overflow():
    keys = mx.random.normal((30, 8), key=mx.random.key(5))
    np.testing.assert_allclose(
        np.array(estimate_filter_dir(keys * 1e30)), np.array(estimate_filter_dir(keys)), atol=1e-5
    )


def test_direction_does_not_depend_on_memory_layout():
    keys = mx.random.normal((2, 64, 3, 16), key=mx.random.key(6))
    view = keys.transpose(0, 2, 1, 3)
    copied = mx.array(np.ascontiguousarray(np.array(view)))
    assert mx.array_equal(estimate_filter_dir(view), estimate_filter_dir(copied)).item()


def test_heads_do_not_depend_on_their_neighbours():
    keys = mx.random.normal((2, 3, 64, 16), key=mx.random.key(7))
    assert mx.array_equal(estimate_filter_dir(keys)[1, 2], estimate_filter_dir(keys[1:, 2:])[0, 0]).item()


def test_estimate_traces_under_compile():
    keys = mx.random.normal((2, 3, 20, 8), key=mx.random.key(8))
    np.testing.assert_allclose(
        np.array(mx.compile(estimate_filter_dir)(keys)), np.array(estimate_filter_dir(keys)), atol=1e-6
    )


@pytest.mark.parametrize("shape", [(8,), (0, 8), (4, 0)])
def test_keys_without_rows_are_refused(shape):
    with pytest.raises(ValueError, match="keys must be"):
        estimate_filter_dir(mx.zeros(shape))

"""Filters from queries: the estimator itself, its streaming form and the average over GQA groups."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_fn.directions.query_gram import (
    average_gqa_filters,
    compute_qfilters,
    query_gram_filters,
    query_gram_init,
    query_gram_merge,
    query_gram_update,
)


def drifting_queries(seed: int, n_heads: int = 3, n_tokens: int = 200, dim: int = 16, drift: float = 4.0):
    """Standard normal queries around `drift` times a planted unit direction; also returns the directions."""
    rng = np.random.default_rng(seed)
    planted = rng.normal(size=(n_heads, dim))
    planted /= np.linalg.norm(planted, axis=-1, keepdims=True)
    queries = rng.normal(size=(n_heads, n_tokens, dim)) + drift * planted[:, None]
    return queries.astype(np.float32), planted


def svd_filters(queries: np.ndarray) -> np.ndarray:
    """Equation 1 as printed: full SVD, sign from the sum of the left vector."""
    filters = []
    for head in queries.astype(np.float64):
        u, _, vt = np.linalg.svd(head, full_matrices=False)
        filters.append(np.sign(u[:, 0].sum()) * vt[0])
    return np.stack(filters)


def cosines(a, b) -> np.ndarray:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_filter_is_the_signed_top_singular_vector():
    queries, _ = drifting_queries(0)
    np.testing.assert_allclose(np.array(compute_qfilters(mx.array(queries))), svd_filters(queries), atol=1e-6)


def test_planted_drift_is_recovered_with_its_sign():
    queries, planted = drifting_queries(1)
    assert cosines(compute_qfilters(mx.array(queries)), planted).min() > 0.99


def test_negated_drift_flips_the_filter():
    queries, planted = drifting_queries(1)
    assert cosines(compute_qfilters(mx.array(-queries)), planted).max() < -0.99


def test_sign_is_the_arithmetic_sum_not_a_majority_vote():
    # Three weak queries point one way, one strong query the other: the sum decides.
    queries = mx.array([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-9.0, 0.0]]])
    np.testing.assert_allclose(np.array(compute_qfilters(queries)), [[-1.0, 0.0]], atol=1e-7)


def test_does_not_mean_center():
    rng = np.random.default_rng(2)
    queries = rng.normal(scale=0.1, size=(1, 400, 8))
    queries[..., 0] += 3.0  # the drift
    queries[..., 1] += rng.normal(size=400)  # the axis of largest variance
    centred = queries - queries.mean(1, keepdims=True)
    assert np.abs(svd_filters(centred)[0, 1]) > 0.99
    assert np.array(compute_qfilters(mx.array(queries.astype(np.float32))))[0, 0] > 0.99


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_filters_are_float32_of_unit_norm(dtype):
    filters = compute_qfilters(mx.array(drifting_queries(3)[0]).astype(dtype))
    assert filters.dtype == mx.float32
    np.testing.assert_allclose(np.linalg.norm(np.array(filters), axis=-1), 1.0, atol=1e-6)


def test_large_queries_do_not_overflow():
    queries, planted = drifting_queries(4)
    assert cosines(compute_qfilters(mx.array(queries) * 1e30), planted).min() > 0.99


@given(
    cuts=st.lists(st.integers(0, 60), max_size=6).map(sorted),
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 2),
)
@settings(max_examples=25, deadline=None)
def test_streaming_equals_one_shot(cuts, seed, batch):
    queries, _ = drifting_queries(seed, n_tokens=60)
    state = query_gram_init(3, 16)
    for start, stop in zip([0, *cuts], [*cuts, 60], strict=True):
        block = mx.array(queries[:, start:stop])
        state = query_gram_update(state, block if batch == 1 else mx.stack([block, block]))
    np.testing.assert_allclose(
        np.array(query_gram_filters(state)), np.array(compute_qfilters(mx.array(queries))), atol=1e-6
    )
    assert state.count.item() == 60 * batch


@given(cut=st.integers(1, 59), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_merge_equals_concatenation(cut, seed):
    queries, _ = drifting_queries(seed, n_tokens=60)
    first, second = (
        query_gram_update(query_gram_init(3, 16), mx.array(part)) for part in np.split(queries, [cut], axis=1)
    )
    merged = query_gram_filters(query_gram_merge(first, second))
    assert cosines(merged, svd_filters(queries)).min() > 1 - 1e-6


def test_update_leaves_the_given_record_usable():
    queries, _ = drifting_queries(5)
    state = query_gram_update(query_gram_init(3, 16), mx.array(queries[:, :50]))
    query_gram_update(state, mx.array(-10 * queries))
    assert cosines(query_gram_filters(state), svd_filters(queries[:, :50])).min() > 1 - 1e-6


def test_padding_past_valid_never_counts():
    queries, _ = drifting_queries(6)
    rows = np.stack([queries, queries])
    rows[1, :, 30:] = np.nan
    state = query_gram_update(query_gram_init(3, 16), mx.array(rows), valid=mx.array([200, 30]))
    real = np.concatenate([queries, queries[:, :30]], axis=1)
    assert state.count.item() == 230
    assert cosines(query_gram_filters(state), svd_filters(real)).min() > 1 - 1e-6


def test_update_traces_under_compile():
    queries = mx.array(drifting_queries(7)[0])

    @mx.compile
    def sums(block: mx.array) -> tuple[mx.array, mx.array]:
        state = query_gram_update(query_gram_init(3, 16), block)
        return state.gram, state.total

    expected = query_gram_update(query_gram_init(3, 16), queries)
    np.testing.assert_allclose(np.array(sums(queries)[0]), np.array(expected.gram), rtol=1e-12)


def test_sampling_is_seeded():
    queries = mx.array(drifting_queries(8)[0])
    once, again, other = (compute_qfilters(queries, 40, seed=seed) for seed in (0, 0, 1))
    assert mx.array_equal(once, again).item()
    assert not mx.array_equal(once, other).item()


def test_sampling_more_than_there_is_uses_every_query():
    queries = mx.array(drifting_queries(9)[0])
    assert mx.array_equal(compute_qfilters(queries, 3000), compute_qfilters(queries)).item()


def test_head_without_any_query_direction_stays_finite():
    filters = np.array(compute_qfilters(mx.zeros((2, 5, 8))))
    np.testing.assert_allclose(np.linalg.norm(filters, axis=-1), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (mx.ones((4, 8)), r"\[H_q,N,D\]"),
        (mx.ones((1, 2, 4, 8)), "query_gram_update"),
        (mx.ones((2, 0, 8)), "no token"),
        (mx.full((2, 4, 8), float("nan")), "finite"),
        (mx.full((2, 4, 8), float("inf")), "finite"),
    ],
)
def test_bad_queries_are_refused(queries, message):
    with pytest.raises(ValueError, match=message):
        compute_qfilters(queries)


def test_sampling_nothing_is_refused():
    with pytest.raises(ValueError, match="max_samples_per_head"):
        compute_qfilters(mx.ones((2, 4, 8)), max_samples_per_head=0)


def test_queries_of_another_layer_shape_are_refused():
    with pytest.raises(ValueError, match="one record belongs to one attention layer"):
        query_gram_update(query_gram_init(3, 16), mx.ones((4, 10, 16)))


def test_valid_of_another_batch_is_refused():
    with pytest.raises(ValueError, match="valid"):
        query_gram_update(query_gram_init(3, 16), mx.ones((2, 3, 10, 16)), valid=mx.array([1, 2, 3]))


def test_records_of_another_shape_do_not_merge():
    with pytest.raises(ValueError, match="cannot be merged"):
        query_gram_merge(query_gram_init(3, 16), query_gram_init(3, 8))


def test_filters_of_an_empty_record_are_refused():
    with pytest.raises(ValueError, match="no query"):
        query_gram_filters(query_gram_init(3, 16))


def test_gqa_average_is_over_consecutive_groups():
    filters = np.eye(6, 8, dtype=np.float32)
    averaged = np.array(average_gqa_filters(mx.array(filters), 2))
    expected = filters.reshape(2, 3, 8).sum(1) / np.sqrt(3)
    np.testing.assert_allclose(averaged, expected, atol=1e-6)


def test_gqa_average_has_unit_norm():
    averaged = average_gqa_filters(compute_qfilters(mx.array(drifting_queries(10, n_heads=6)[0])), 3)
    assert averaged.dtype == mx.float32
    np.testing.assert_allclose(np.linalg.norm(np.array(averaged), axis=-1), 1.0, atol=1e-6)


def test_gqa_average_of_single_groups_changes_nothing():
    filters = compute_qfilters(mx.array(drifting_queries(11)[0]))
    np.testing.assert_allclose(np.array(average_gqa_filters(filters, 3)), np.array(filters), atol=1e-7)


@pytest.mark.parametrize(
    ("filters", "n_kv_heads", "message"),
    [
        (mx.ones((9, 4)), 2, "9 query heads"),
        (mx.ones((9, 4)), 0, "n_kv_heads"),
        (mx.ones((2, 9, 4)), 3, r"\[H_q,D\]"),
        (mx.full((4, 4), float("nan")), 2, "finite"),
        (mx.array([[1.0, 0.0], [-1.0, 0.0]]), 1, "cancel"),
    ],
)
def test_bad_groups_are_refused(filters, n_kv_heads, message):
    with pytest.raises(ValueError, match=message):
        average_gqa_filters(filters, n_kv_heads)


def test_a_block_of_no_queries_adds_nothing():
    state = query_gram_update(query_gram_init(3, 16), mx.ones((3, 5, 16)))
    assert query_gram_update(state, mx.zeros((3, 0, 16))) is state

"""Masks of ragged batches, against loops written out."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from velox_cache.caches.masks import causal_array, ragged_mask
from velox_fn import qfilters

H, D = 2, 4


def store(lengths, calls=(), budget=6, n_tokens=None):
    """A store whose rows saw these numbers of tokens in one padded call, then `calls` of unpadded ones."""
    method = qfilters(budget=budget, n_sink=0, filters=mx.ones((H, D)))
    state = method.init(len(lengths), H, D)
    rng = np.random.default_rng(0)
    for i, n in enumerate((max(lengths), *calls)):
        block = mx.array(rng.standard_normal((len(lengths), H, n, D)).astype(np.float32))
        state, _ = method.update(state, block, block, valid=mx.array(lengths, mx.int32) if i == 0 else None)
    return state.store


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 5))
def test_mask_of_the_first_block_is_causal_over_real_tokens(valid, n_tokens):
    valid = [min(count, n_tokens) for count in valid]
    mask = np.array(ragged_mask(None, n_tokens, mx.array(valid, mx.int32)))
    assert mask.shape == (len(valid), 1, n_tokens, n_tokens)
    for b, count in enumerate(valid):
        for query in range(n_tokens):
            for key in range(n_tokens):
                expected = key <= query and (key < count or key == query)
                assert mask[b, 0, query, key] == expected


@pytest.mark.parametrize("n_tokens", [2, 3])
def test_padding_among_the_kept_rows_is_masked(n_tokens):
    mask = np.array(ragged_mask(store([2, 4]), n_tokens, mx.array([n_tokens, n_tokens - 1], mx.int32)))
    assert mask.shape == (2, 1, n_tokens, 4 + n_tokens)
    assert mask[0, 0, :, :4].tolist() == [[True, True, False, False]] * n_tokens
    assert mask[1, 0, :, :4].all()
    np.testing.assert_array_equal(mask[0, 0, :, 4:], np.tri(n_tokens, dtype=bool))


def test_one_token_over_budget_sees_the_row_that_it_lands_on():
    # Row 0 has 3 tokens among 7 physical rows; after the step its query sees 4.
    before = store([1, 9], calls=(1, 1))
    mask = np.array(ragged_mask(before, 1, mx.array([1, 1], mx.int32)))
    assert mask.shape == (2, 1, 1, 7)
    assert mask[0].sum() == 4
    assert mask[1].all()


def test_no_query_is_left_without_a_row_to_see():
    # a softmax over nothing is NaN
    for valid in ([0, 0], [0, 3]):
        assert np.array(ragged_mask(None, 3, mx.array(valid, mx.int32))).any(-1).all()


@pytest.mark.parametrize(("n_rows", "n_tokens"), [(0, 1), (0, 4), (5, 1), (5, 4)])
def test_causal_array_is_ones_then_a_lower_triangle(n_rows, n_tokens):
    mask = causal_array(n_rows, n_tokens)
    assert mask.dtype == mx.bool_
    np.testing.assert_array_equal(np.array(mask), np.tri(n_tokens, n_rows + n_tokens, n_rows, dtype=bool))

"""The one selection rule, against a sort written out."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import best_positions

from velox_fn.engine import select

SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1.0000001, 0.99999994, 1e-45, -1e-45, 3.4e38]),
    st.floats(width=32),
)


def ranked(scores, positions, n_sink=0):
    """Ranks [1,1,n] of finite rows with these scores and positions."""
    ones = mx.ones((1, 1, len(scores), 2))
    positions = mx.array(np.array(positions, np.int32).reshape(1, 1, -1))
    scores = select.Scores(mx.array(np.array(scores, np.float32).reshape(1, 1, -1)), unseen=(ones, ones))
    return select.arrival_ranks(scores, positions, n_sink)


def kept(ranks, offset, keep, recent=0):
    competing = select.competing_ranks(ranks, mx.array([offset], mx.int32), recent)
    index = select.survivors(competing, keep)
    return np.array(mx.take_along_axis(select.rank_positions(ranks), index, axis=-1))[0, 0].tolist()


@st.composite
def choices(draw):
    scores = draw(st.lists(SCORES, min_size=1, max_size=24))
    budget = draw(st.integers(1, len(scores)))
    n_sink = draw(st.integers(0, budget - 1))
    recent = draw(st.integers(0, budget - 1 - n_sink))
    order = draw(st.permutations(range(len(scores))))
    return scores, order, budget, n_sink, recent


@given(choices())
def test_survivors_are_those_of_a_sort_written_out(choice):
    scores, order, budget, n_sink, recent = choice
    shuffled = [scores[position] for position in order]
    found = kept(ranked(shuffled, order, n_sink), len(scores), budget, recent)
    expected = best_positions(np.array(shuffled), order, len(scores), budget=budget, n_sink=n_sink, recent=recent)
    assert sorted(found) == expected


@given(choices())
def test_victim_is_the_row_that_survivors_leave_out(choice):
    scores, order, _, n_sink, recent = choice
    if len(scores) < 2 or n_sink + recent >= len(scores):
        return
    ranks = ranked([scores[position] for position in order], order, n_sink)
    competing = select.competing_ranks(ranks, mx.array([len(scores)], mx.int32), recent)
    stay = np.array(select.survivors(competing, len(scores) - 1)).ravel().tolist()
    assert set(range(len(scores))) - set(stay) == {select.victim(competing).item()}


def test_among_equal_scores_the_highest_position_loses():
    assert sorted(kept(ranked([7.0] * 5, [3, 0, 4, 1, 2]), 5, 3)) == [0, 1, 2]


def test_negative_zero_equals_positive_zero():
    assert sorted(kept(ranked([0.0, -0.0, 0.0, -0.0], [3, 0, 2, 1]), 4, 2)) == [0, 1]


def test_negative_zero_equals_positive_zero_inside_a_compiled_function():
    pack = mx.compile(select.pack_ranks)
    plus, minus = (pack(mx.array([zero]), mx.array([5], mx.int32)).item() for zero in (0.0, -0.0))
    assert plus == minus


def test_scores_one_ulp_apart_are_told_apart():
    above = np.nextafter(np.float32(0.1), np.float32(1))
    assert kept(ranked([0.1, above], [0, 1]), 2, 1) == [1]
    assert kept(ranked([-above, -0.1], [0, 1]), 2, 1) == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["score", "key", "value"])
def test_a_row_that_is_not_finite_loses_to_every_finite_score(bad, where):
    scores, keys, values = np.full((1, 1, 3), -3e38, np.float32), np.ones((1, 1, 3, 4)), np.ones((1, 1, 3, 2))
    {"score": scores, "key": keys, "value": values}[where][0, 0, 0] = bad
    positions = mx.array([[[0, 1, 2]]], mx.int32)
    rows = (mx.array(keys.astype(np.float32)), mx.array(values.astype(np.float32)))
    ranks = select.arrival_ranks(select.Scores(mx.array(scores), unseen=rows), positions, 0)
    assert kept(ranks, 3, 2) == [1, 2]


def test_a_sink_that_is_not_finite_stays():
    assert kept(ranked([np.nan, 5.0, 6.0], [0, 1, 2], n_sink=1), 3, 2) == [0, 2]


def test_padding_loses_to_a_token_that_is_not_finite():
    assert kept(ranked([9.0, np.nan, 9.0], [-1, 0, -1]), 1, 1) == [0]


@pytest.mark.parametrize("order", [[-1, -1, 0, 1, 2], [0, 1, 2, -1, -1], [0, -1, 1, -1, 2]], ids=str)
def test_padding_is_never_in_the_recent_window(order):
    # A window longer than the sequence reaches below position 0, where padding has its -1.
    ranks = ranked([float(position) for position in order], order)
    assert kept(ranks, 3, 3, recent=10) == [0, 1, 2]


@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 2**31))
def test_padding_survives_last_and_at_the_same_rows_in_every_head(n_tokens, n_padding, seed):
    rng = np.random.default_rng(seed)
    positions = rng.permutation([*range(n_tokens), *[-1] * n_padding])
    positions = np.broadcast_to(positions, (1, 8, n_tokens + n_padding))
    ranks = select.pack_ranks(
        mx.array(rng.standard_normal(positions.shape).astype(np.float32)), mx.array(positions.astype(np.int32))
    )
    for keep in range(1, n_tokens + n_padding):
        left = np.array(mx.take_along_axis(select.rank_positions(ranks), select.survivors(ranks, keep), axis=-1))
        n_real = min(keep, n_tokens)
        assert (left[..., :n_real] >= 0).all()
        assert (left[..., n_real:] == -1).all()


@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.integers(0, 2**31 - 1)), min_size=1, max_size=9))
def test_ranks_hold_score_and_position(rows):
    scores, positions = (np.array(column) for column in zip(*rows, strict=True))
    ranks = select.pack_ranks(mx.array(scores.astype(np.float32)), mx.array(positions.astype(np.int32)))
    assert np.array(select.rank_positions(ranks)).tolist() == positions.tolist()
    np.testing.assert_array_equal(np.array(select.rank_scores(ranks)), scores.astype(np.float32))


def test_padding_rank_is_the_packed_one():
    assert select.pack_ranks(mx.array([5.0]), mx.array([-1], mx.int32)).item() == select.PADDING

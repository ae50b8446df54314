"""Rows that compete in chunks, against the rule written out; and what is refused."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_fn import chunked, curdkv, kept_positions, l2norm, snapkv
from velox_fn.engine import select
from velox_fn.registry import method_named
from velox_fn.testing import Layer, block, fed


def expected(scores, positions, offset, *, budget, n_sink, recent, chunk):
    """Positions kept of rows with these scores, by the mean score of a chunk."""
    stays = [at for at in positions if at < n_sink or at >= offset - recent]
    of_row = dict(zip(positions, scores, strict=True))
    rest = [at for at in positions if at not in stays]
    sound = [at for at in rest if np.isfinite(of_row[at])]
    means = {
        c: np.mean([of_row[at] for at in sound if at // chunk == c], dtype=np.float64)
        for c in {at // chunk for at in sound}
    }
    order = sorted(sound, key=lambda at: (-means[at // chunk], at)) + [at for at in rest if at not in sound]
    return sorted([*stays, *order[: budget - len(stays)]])


@st.composite
def rows(draw):
    positions = sorted(draw(st.sets(st.integers(0, 60), min_size=8, max_size=24)))
    # Small whole numbers: sums are exact, so that equal means over up to 8 rows are ties.
    scores = draw(st.lists(st.one_of(st.integers(-9, 9), st.just(np.nan)), min_size=24, max_size=24))
    order = draw(st.permutations(range(len(positions))))
    return positions, [float(score) for score in scores[: len(positions)]], order, draw(st.sampled_from([2, 4, 8]))


@given(rows(), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
@settings(max_examples=80)
def test_chunks_leave_by_their_mean_score(case, n_sink, recent, n_padding):
    positions, scores, order, chunk = case
    budget, offset = 8, positions[-1] + 1
    shuffled = [positions[i] for i in order] + [-1] * n_padding
    held = mx.array([[[scores[i] for i in order] + [0.0] * n_padding]])
    ranks = select.arrival_ranks(
        select.Scores(held, unseen=(mx.ones((1, 1, held.shape[2], 1)),)), mx.array([[shuffled]], mx.int32), n_sink
    )
    by_chunk = select.chunk_ranks(ranks, mx.array([offset], mx.int32), recent, chunk)
    index = select.survivors(select.competing_ranks(by_chunk, mx.array([offset], mx.int32), recent), budget)
    kept = np.array(mx.take_along_axis(select.rank_positions(ranks), index, axis=-1)).ravel().tolist()
    assert sorted(kept) == expected(scores, positions, offset, budget=budget, n_sink=n_sink, recent=recent, chunk=chunk)


@pytest.mark.parametrize(("recent", "expected"), [(0, [-1.0] * 4 + [2.0] * 2), (3, [2.0] * 3 + [-10.0, 1.0, 3.0])])
def test_a_mean_is_of_the_rows_of_a_chunk_that_compete(recent, expected):
    positions = mx.arange(6, dtype=mx.int32)[None, None]
    ranks = select.pack_ranks(mx.array([[[6.0, 0.0, 0.0, -10.0, 1.0, 3.0]]]), positions)
    by_chunk = select.chunk_ranks(ranks, mx.array([6], mx.int32), recent, 4)
    assert select.rank_scores(by_chunk).tolist() == [[expected]]


def test_equal_means_of_unlike_chunks_are_a_tie():
    scores = mx.array([[[0.0, 5.0, -8.0, -mx.inf, -1.0, -mx.inf, -mx.inf, -mx.inf]]])
    ranks = select.pack_ranks(scores, mx.arange(8, dtype=mx.int32)[None, None])
    by_chunk = select.rank_scores(select.chunk_ranks(ranks, mx.array([8], mx.int32), 0, 4))
    assert by_chunk[0, 0, [0, 1, 2, 4]].tolist() == [-1.0] * 4


def test_a_mean_of_large_scores_does_not_overflow():
    ranks = select.pack_ranks(mx.full((1, 1, 4), 3e38), mx.arange(4, dtype=mx.int32)[None, None])
    by_chunk = select.chunk_ranks(ranks, mx.array([4], mx.int32), 0, 4)
    assert mx.isfinite(select.rank_scores(by_chunk)).all().item()


def test_rows_that_leave_one_by_one_are_no_chunk():
    with pytest.raises(ValueError, match="interval=80"):
        method_named("l2norm").make(budget=64, chunk=10)
    with pytest.raises(ValueError, match="granularity='block'"):
        method_named("curdkv").make(budget=64, interval=32, chunk=10, granularity="token")
    with pytest.raises(ValueError, match="interval too"):
        chunked(snapkv(budget=64), 2)


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True, "8", None], ids=repr)
def test_a_chunk_that_is_no_whole_number_is_refused(chunk):
    with pytest.raises(ValueError, match="chunk must be"):
        chunked(curdkv(budget=64, interval=32), chunk)


def test_quantised_rows_stay_in_the_same_chunks():
    settings = {"budget": 16, "interval": 8, "chunk": 3}
    tokens = block(60, layer=Layer(head_dim=32, value_dim=32))
    plain = fed(method_named("l2norm").make(**settings), tokens, [8] * 7 + [4])
    small = fed(method_named("l2norm").make(**settings, key_bits=8, value_bits=4, group_size=32), tokens, [8] * 7 + [4])
    np.testing.assert_array_equal(np.array(kept_positions(plain)), np.array(kept_positions(small)))


def test_a_chunk_of_one_position_is_the_method_itself():
    method = l2norm(budget=64, interval=32)
    assert chunked(method, 1) is method

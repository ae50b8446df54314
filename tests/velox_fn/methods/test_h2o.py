"""H2O: attention mass added up, against a loop written out."""

import mlx.core as mx
import numpy as np
import pytest
from oracles import attention, best_positions

from velox_fn import arrays, h2o, kept_positions
from velox_fn.engine.select import rank_scores
from velox_fn.engine.store import kept_rows


def tokens(n_tokens, *, batch=1, heads=2, groups=1, seed=0):
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, batch, heads, n_tokens, 8)).astype(np.float32)
    return keys, values, rng.normal(size=(batch, heads * groups, n_tokens, 8)).astype(np.float32)


def run(keys, values, queries=None, splits=None, **settings):
    method = h2o(**({"budget": 12, "n_sink": 2, "grace": 3} | settings))
    state = method.init(keys.shape[0], keys.shape[1], 8)
    at = 0
    for size in splits or [keys.shape[2]]:
        part = slice(at, at + size)
        given = None if queries is None else mx.array(queries[:, :, part])
        state, _ = method.update(state, mx.array(keys[:, :, part]), mx.array(values[:, :, part]), queries=given)
        at += size
    return state


def kept(state, head=0, batch=0):
    return np.array(kept_positions(state))[batch, head].tolist()


def scores(state, head=0):
    return np.array(rank_scores(kept_rows(state.store).ranks))[0, head]


def loop(keys, queries, splits, budget=12, n_sink=2, grace=3):
    """One head, keys [N,D] and queries [G,N,D]: (kept positions, their cumulative scores)."""
    rows, score, at = [], {}, 0
    for size in splits:
        block = list(range(at, at + size))
        rows, at = rows + block, at + size
        visible = np.array(rows)[None] <= np.array(block)[:, None]
        for query in queries:  # attention over an identity matrix of values is its weights
            weights = attention(query[None, block], keys[None, rows], np.eye(len(rows))[None], 8**-0.5, visible)
            for row, mass in zip(rows, weights[0].sum(0), strict=True):
                score[row] = score.get(row, 0.0) + mass
        merits = np.array([score[row] for row in rows])
        rows = best_positions(merits, rows, at, budget=budget, n_sink=n_sink, recent=grace)
    return rows, np.array([score[row] for row in rows])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("splits", [[50], [1] * 50, [20, 1, 1, 13, 15], [300]])
def test_kept_rows_and_scores_equal_a_loop_written_out(groups, splits):
    keys, values, queries = tokens(sum(splits), groups=groups)
    state = run(keys, values, queries, splits)
    for head in range(2):
        of_group = queries[0, head * groups : (head + 1) * groups]
        positions, expected = loop(keys[0, head], of_group, splits)
        assert kept(state, head) == positions
        np.testing.assert_allclose(scores(state, head)[2:], expected[2:], rtol=1e-4)


def test_a_block_of_more_queries_than_are_held_at_once_is_scored_as_one():
    keys, values, queries = tokens(300)
    state = run(keys, values, queries, budget=400)
    _, expected = loop(keys[0, 0], queries[0, :1], [300], budget=400)
    np.testing.assert_allclose(scores(state)[2:], expected[2:], rtol=1e-4)


def test_keys_stand_in_for_queries():
    keys, values, _ = tokens(50, seed=1)
    assert kept(run(keys, values)) == kept(run(keys, values, keys))


def test_score_of_all_rows_adds_up_to_the_queries_seen():
    keys, values, queries = tokens(30, groups=3, seed=2)
    found = scores(run(keys, values, queries, budget=40, n_sink=0))
    assert found.sum() == pytest.approx(3 * 30, rel=1e-5)


def test_rows_within_grace_are_never_evicted():
    keys, values, queries = tokens(50, seed=3)
    assert kept(run(keys, values, queries, [1] * 50, grace=5))[-5:] == [45, 46, 47, 48, 49]


def test_a_sequence_does_not_change_by_its_neighbours():
    keys, values, queries = tokens(40, batch=3, groups=2, seed=4)
    together = run(keys, values, queries)
    for b in range(3):
        alone = run(keys[b : b + 1], values[b : b + 1], queries[b : b + 1])
        assert kept(together, 1, b) == kept(alone, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_key_that_is_not_finite_draws_no_attention(bad):
    keys, values, queries = tokens(40, seed=5)
    keys[0, 0, 20, 1] = bad
    state = run(keys, values, queries)
    assert 20 not in kept(state)
    assert np.isfinite(scores(state)[2:]).all()


def test_two_runs_agree_bit_for_bit():
    keys, values, queries = tokens(40, seed=6)
    once, again = (run(keys, values, queries, [25, 1, 14]) for _ in range(2))
    assert all(mx.array_equal(a, b).item() for a, b in zip(arrays(once), arrays(again), strict=True))


def test_grace_that_leaves_no_choice_is_refused():
    with pytest.raises(ValueError, match="n_sink \\+ grace must be smaller than budget"):
        h2o(budget=8, n_sink=4, grace=4)

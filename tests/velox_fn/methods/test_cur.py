"""CUR as its authors released it: norms within windows, against loops written out."""

import mlx.core as mx
import numpy as np
import pytest
from oracles import best_positions

from velox_fn.engine.eviction import kept_positions
from velox_fn.engine.select import rank_scores
from velox_fn.engine.store import kept_rows
from velox_fn.methods.cur import COMBINE, cur


def tokens(n_tokens, *, batch=1, heads=2, value_dim=6, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(batch, heads, n_tokens, 8)) * rng.gamma(2, size=(batch, heads, n_tokens, 1))
    values = rng.normal(size=(batch, heads, n_tokens, value_dim)) * rng.gamma(2, size=(batch, heads, n_tokens, 1))
    return keys.astype(np.float32), values.astype(np.float32)


def windowed_shares(rows, window):
    """|x_i|^2 over its sum in the window of token i, the last one as long as it is: rows [n,D] -> [n]."""
    energies = [float(sum(float(x) ** 2 for x in row)) for row in rows]
    shares = []
    for i, energy in enumerate(energies):
        start = i - i % window
        shares.append(energy / sum(energies[start : start + window]))
    return np.array(shares)


def expected_scores(keys, values, combine, window):
    of_key, of_value = windowed_shares(keys, window), windowed_shares(values, window)
    return {"key": of_key, "value": of_value, "mean": (of_key + of_value) / 2, "product": of_key * of_value}[combine]


def run(keys, values, splits=None, valid=None, **settings):
    method = cur(**settings)
    state = method.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
    at = 0
    for size in splits or [keys.shape[2]]:
        part = slice(at, at + size)
        state, _ = method.update(state, mx.array(keys[:, :, part]), mx.array(values[:, :, part]), valid=valid)
        at += size
    return state


def kept(state, head=0, batch=0):
    return np.array(kept_positions(state))[batch, head].tolist()


def scores(state, head=0):
    return np.array(rank_scores(kept_rows(state.store).ranks))[0, head]


@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("n_tokens", [5, 16, 17, 32, 47])
def test_scores_equal_a_loop_written_out_and_the_tail_window_has_its_true_length(combine, n_tokens):
    keys, values = tokens(n_tokens)
    state = run(keys, values, budget=64, n_sink=0, combine=combine)
    for head in range(2):
        expected = expected_scores(keys[0, head], values[0, head], combine, 16)
        np.testing.assert_allclose(scores(state, head), expected, rtol=1e-5)


@pytest.mark.parametrize("combine", COMBINE)
def test_kept_rows_are_the_best_of_that_loop(combine):
    keys, values = tokens(70, seed=1)
    state = run(keys, values, budget=20, n_sink=3, recent=5, combine=combine)
    for head in range(2):
        merit = expected_scores(keys[0, head], values[0, head], combine, 16)
        assert kept(state, head) == best_positions(merit, list(range(70)), 70, budget=20, n_sink=3, recent=5)


@pytest.mark.parametrize("splits", [[7, 9, 1, 1, 20, 9], [1] * 47, [16, 31]])
def test_windows_that_calls_cut_through_are_scored_whole(splits):
    keys, values = tokens(47, seed=2)
    state = run(keys, values, splits, budget=64, n_sink=0)
    np.testing.assert_allclose(scores(state), expected_scores(keys[0, 0], values[0, 0], "product", 16), rtol=1e-4)


def test_rows_evicted_from_the_unfinished_window_still_count_in_it():
    keys, values = tokens(26, seed=3)
    state = run(keys, values, [20] + [1] * 6, budget=10, n_sink=0)
    merit = expected_scores(keys[0, 0], values[0, 0], "product", 16)
    np.testing.assert_allclose(scores(state), merit[kept(state)], rtol=1e-4)


def test_padded_sequences_score_as_they_would_alone():
    keys, values = tokens(40, batch=2, seed=4)
    state = run(keys, values, valid=mx.array([40, 21], mx.int32), budget=12)
    alone = run(keys[1:, :, :21], values[1:, :, :21], budget=12)
    for head in range(2):
        assert [p for p in kept(state, head, 1) if p >= 0] == kept(alone, head)


def test_sketch_is_seeded():
    keys, values = tokens(40, seed=5)
    once, again = (run(keys, values, budget=12, sketch=20, seed=1) for _ in range(2))
    assert mx.array_equal(once.store.ranks, again.store.ranks).item()
    other = run(keys, values, budget=12, sketch=20, seed=2)
    assert not mx.array_equal(once.store.ranks, other.store.ranks).item()


def test_a_wide_sketch_keeps_norms():
    keys, values = tokens(40, seed=6)
    exact = scores(run(keys, values, budget=64, n_sink=0))
    sketched = scores(run(keys, values, budget=64, n_sink=0, sketch=4096))
    np.testing.assert_allclose(sketched, exact, rtol=0.2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_loses_and_spares_its_window(bad):
    keys, values = tokens(30, seed=7)
    keys[0, 0, 9, 2] = bad
    state = run(keys, values, budget=20, n_sink=0)
    assert 9 not in kept(state)
    assert np.isfinite(scores(state)).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"combine": "sum"}, "combine must be one of"),
        ({"window": 0}, "window must be at least 1"),
        ({"sketch": 0}, "sketch must be at least 1"),
        ({"budget": 4, "n_sink": 4}, "must be smaller than budget"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        cur(**settings)

"""MorphKV keeps what the queries of a recent window attended to, each at its own time."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import attention, tokens
from oracles import best_positions

from velox_fn import kept_positions, morphkv
from velox_fn.engine.batch import merge, take, trim
from velox_fn.engine.records import replaced
from velox_fn.engine.select import rank_scores

WINDOW, N_SINK, BUDGET = 4, 2, 14


def expected(keys, queries, head, calls, fuse):
    """Kept positions, by the weights that each query gave at its time to the rows that were there."""
    kept, given, offset = [], {}, 0
    for n_tokens in calls:
        block = list(range(offset, offset + n_tokens))
        held, offset = kept + block, offset + n_tokens
        for at in block:
            by_head = [attention(queries[h, [at]], [at], keys[head], held)[0] for h in (2 * head, 2 * head + 1)]
            given[at] = dict(zip(held, getattr(np, fuse)(by_head, axis=0), strict=True))
        window = range(max(offset - WINDOW, 0), offset)
        scores = np.array([getattr(np, fuse)([given[at].get(row, 0.0) for at in window]) for row in held])
        kept = best_positions(scores, held, offset, budget=BUDGET, n_sink=N_SINK, recent=WINDOW)
    return kept


def run(method, state, data, calls, start=0):
    for n_tokens in calls:
        keys, values, queries = (mx.array(part[None, :, start : start + n_tokens]) for part in data)
        state, _ = method.update(state, keys, values, queries=queries)
        start += n_tokens
    return state


@pytest.mark.parametrize("fuse", ["sum", "max"])
@pytest.mark.parametrize("calls", [[50], [1] * 50, [30, 1, 1, 2, 3, 13], [20, *[1] * 30]], ids=str)
def test_rows_that_the_window_attended_to_stay(calls, fuse):
    data = tokens(50)
    method = morphkv(budget=BUDGET, n_sink=N_SINK, obs_window=WINDOW, fuse=fuse)
    found = kept_positions(run(method, method.init(1, 2, 8, 6), data, calls)).tolist()[0]
    assert found == [expected(data[0], data[2], head, calls, fuse) for head in range(2)]


def test_weights_follow_their_rows_through_batches():
    data, method = tokens(60, seed=1), morphkv(budget=BUDGET, n_sink=N_SINK, obs_window=WINDOW)
    states = [run(method, method.init(1, 2, 8, 6), data, calls) for calls in ([30, 1, 1, 1], [20], [3])]
    batch = merge(states)
    for t in range(6):
        following = [mx.array(np.stack([part[:, n + t : n + t + 1] for n in (33, 20, 3)])) for part in data]
        batch, _ = method.update(batch, *following[:2], queries=following[2])
    for b, (state, n) in enumerate(zip(states, (33, 20, 3), strict=True)):
        alone = kept_positions(run(method, state, data, [1] * 6, start=n)).tolist()[0]
        assert [[at for at in head if at >= 0] for head in kept_positions(take(batch, [b])).tolist()[0]] == alone


def test_weights_of_queries_that_were_taken_back_do_not_count():
    method, data, others = morphkv(budget=BUDGET, n_sink=N_SINK, obs_window=WINDOW), tokens(20), tokens(20, seed=1)
    before = run(method, method.init(1, 2, 8, 6), data, [8])
    further = run(method, before, data, [3], start=8)
    found = run(method, replaced(further, store=trim(further.store, 3)), others, [1], start=8)
    # Its window is 5 ... 8. The weights of 5 and 6 gave way to those of 9 and 10, and 7 is where it was.
    lost = mx.array([at % WINDOW in (5 % WINDOW, 6 % WINDOW) for at in range(WINDOW)])
    expected = run(method, replaced(before, weights=mx.where(lost, 0.0, before.weights)), others, [1], start=8)
    scores = [np.array(rank_scores(state.store.ranks[:, :, :9])) for state in (found, expected)]
    np.testing.assert_allclose(*scores, rtol=1e-6)


@pytest.mark.parametrize("setting", [{"obs_window": 0}, {"fuse": "mean"}, {"budget": 36}])
def test_settings_that_cannot_work_are_refused(setting):
    with pytest.raises(ValueError, match="|".join(setting)):
        morphkv(**setting)

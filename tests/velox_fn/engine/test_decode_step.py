"""What one token over budget costs: one trace, one row written, no memory that grows."""

import mlx.core as mx
import numpy as np
import pytest

from velox_fn import arrays, kept_positions, qfilters, random_eviction
from velox_fn.engine.landing import STEPS_KEPT
from velox_fn.engine.select import Scores
from velox_fn.engine.static import _compiled_ranks, _compiled_step, static_eviction

H, D, BUDGET = 4, 64, 1024
ROWS = 2 * H * (BUDGET + 1) * D * 4  # bytes of the keys and values of a store


def decoding(method, n_tokens=BUDGET + 3):
    """A state after so many tokens and two more, evaluated and alone in memory."""
    keys = mx.random.normal((1, H, n_tokens, D), key=mx.random.key(0))
    state = method.init(1, H, D)
    state, _ = method.update(state, keys, keys)
    for _ in range(2):
        state, _ = method.update(state, keys[:, :, :1], keys[:, :, :1])
        mx.eval(arrays(state))
    return state


def test_steps_over_budget_are_traced_once():
    traces = []

    def score(keys, values, positions, params):
        traces.append(keys.shape[2])
        return Scores(keys.astype(mx.float32).sum(-1), unseen=(values,))

    method = static_eviction("counted", score, budget=BUDGET, n_sink=4, recent=0)
    state = decoding(method)
    before = len(traces)
    token = mx.ones((1, H, 1, D))
    for _ in range(40):
        state, view = method.update(state, token, token)
        mx.eval(view)
    assert len(traces) == before


def test_a_method_made_anew_uses_the_steps_that_are_compiled_already():
    # A cache per layer and per generation must not trace each by itself.
    filters = mx.ones((H, D))
    decoding(qfilters(budget=BUDGET, filters=filters))
    before = _compiled_step.cache_info().misses
    decoding(qfilters(budget=BUDGET, filters=2 * filters))
    assert _compiled_step.cache_info().misses == before


def test_seeds_and_row_counts_leave_no_compiled_step_each():
    decoding(random_eviction(budget=8), 20)
    kept = [cache.cache_info().misses for cache in (_compiled_step, _compiled_ranks)]
    for seed in range(50):
        decoding(random_eviction(budget=60, seed=seed, n_sink=seed % 5, recent=seed), 70)
    assert [cache.cache_info().misses for cache in (_compiled_step, _compiled_ranks)] == kept


def test_score_functions_made_anew_leave_a_limited_number_of_steps():
    def made():
        return lambda keys, values, positions, params: keys.astype(mx.float32).sum(-1)

    for _ in range(STEPS_KEPT + 3):
        method = static_eviction("closure", made(), budget=4, n_sink=0)
        state = method.init(1, 1, 2)
        for _ in range(7):
            state, _ = method.update(state, mx.ones((1, 1, 1, 2)), mx.ones((1, 1, 1, 2)))
    assert _compiled_step.cache_info().currsize <= STEPS_KEPT


def test_a_plain_array_is_a_score_and_rows_that_are_not_finite_lose():
    def score(keys, values, positions, params):
        return mx.broadcast_to(positions.astype(mx.float32) * params[0], keys.shape[:3])

    method = static_eviction("plain", score, budget=6, n_sink=1, numbers=(2.0,))
    rows = np.ones((1, H, 30, 4), np.float32)
    keys, values = rows.copy(), rows.copy()
    keys[:, :, 26, 1], values[:, :, 28, 0] = np.nan, np.inf
    for calls in ([30], [1] * 30, [10, 1, 1, 18]):
        state, start = method.init(1, H, 4), 0
        for n in calls:
            part = slice(start, start + n)
            state, _ = method.update(state, mx.array(keys[:, :, part]), mx.array(values[:, :, part]))
            start += n
        assert np.array(kept_positions(state)).tolist() == [[[0, 23, 24, 25, 27, 29]] * H]


@pytest.mark.parametrize(
    "wrong", [lambda k: k.sum(-1).astype(mx.float16), lambda k: k, lambda k: k.sum(-1)[:, :1], list]
)
def test_a_score_of_another_shape_is_refused_with_words(wrong):
    method = static_eviction("wrong", lambda keys, values, positions, params: wrong(keys), budget=6)
    keys = mx.ones((1, H, 3, 4))
    with pytest.raises(ValueError, match=r"must return float32 \[B,H,S\] = \(1, 4, 3\)"):
        method.update(method.init(1, H, 4), keys, keys)


def peak_beyond(run):
    """Bytes by which memory peaks while `run` runs, above what is held at its start."""
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    run()
    return mx.get_peak_memory() - held


@pytest.mark.parametrize("recent", [0, 64])
def test_a_step_over_budget_does_not_copy_the_cache(recent):
    method = qfilters(budget=BUDGET, recent=recent, filters=mx.ones((H, D)))
    state = [decoding(method)]
    tokens = mx.random.normal((20, 1, H, 1, D), key=mx.random.key(1))
    mx.eval(tokens)

    def decode():
        for token in tokens:
            state[0], view = method.update(state[0], token, token)
            mx.eval(view)
            del view

    assert peak_beyond(decode) < ROWS / 4


def test_a_step_over_budget_copies_when_the_old_state_is_held():
    # That the measurement above can see a copy, and that purity is kept when it is needed.
    method = qfilters(budget=BUDGET, filters=mx.ones((H, D)))
    held = decoding(method)
    token = mx.ones((1, H, 1, D))

    def decode():
        _, view = method.update(held, token, token)
        mx.eval(view)

    assert peak_beyond(decode) > 0.9 * ROWS


def test_500_decoded_tokens_take_no_more_memory_than_50():
    # Only the view is evaluated, as mlx_lm evaluates only what tokens depend on.
    method = qfilters(budget=64, recent=8, filters=mx.ones((H, D)))
    state = method.init(1, H, D)
    held = []
    for t in range(500):
        token = mx.random.normal((1, H, 1, D), key=mx.random.key(t))
        state, view = method.update(state, token, token)
        mx.eval(view)
        del view, token
        if t in (100, 499):
            held.append(mx.get_active_memory())
    assert held[1] <= held[0] + 4096


@pytest.mark.parametrize("evaluated", ["view", "state"])
def test_under_budget_a_step_does_not_copy_the_cache(evaluated):
    method = qfilters(budget=4 * BUDGET, filters=mx.ones((H, D)))
    state = [decoding(method)]
    tokens = mx.random.normal((20, 1, H, 1, D), key=mx.random.key(1))
    mx.eval(tokens)

    def decode():
        for token in tokens:
            state[0], view = method.update(state[0], token, token)
            mx.eval(view if evaluated == "view" else arrays(state[0]))
            del view

    assert peak_beyond(decode) < ROWS / 4


def test_the_landing_row_takes_each_new_token_and_loses_the_right_one():
    # Scores fall with position, so every new token is the next to go: the landing row alone changes.
    method = qfilters(budget=8, n_sink=0, filters=mx.ones((H, D)))
    state = method.init(1, H, D)
    for t in range(30):
        token = mx.full((1, H, 1, D), -float(t))
        state, view = method.update(state, token, token)
        assert (np.array(view[0])[..., 0] == -t).any(axis=-1).all()
        assert np.array(kept_positions(state))[0, 0].tolist() == list(range(min(t + 1, 8)))


@pytest.mark.parametrize("n_seen", [BUDGET, BUDGET + 3], ids=["no landing row", "a landing row"])
def test_a_block_in_flight_holds_old_rows_view_and_survivors_once(n_seen):
    # MLX allocates ahead of what it computes, so the old rows, taken in turn without their landing row, count as well.
    n_tokens, method = 512, qfilters(budget=BUDGET, filters=mx.ones((H, D)))
    rows = mx.random.normal((1, H, n_seen, D), key=mx.random.key(0))
    state, _ = method.update(method.init(1, H, D), rows[:, :, :BUDGET], rows[:, :, :BUDGET])
    for t in range(BUDGET, n_seen):
        state, _ = method.update(state, rows[:, :, t, None], rows[:, :, t, None])
    block = rows[:, :, :n_tokens] + 1
    mx.eval(arrays(state), block)
    held = [state]
    del state, rows

    def take_in():
        held[0], view = method.update(held[0], block, block)
        mx.eval(view, arrays(held[0]))

    view, survivors = BUDGET + n_tokens, BUDGET
    without_landing_row = BUDGET if n_seen > BUDGET else 0
    at_once = view + survivors + without_landing_row
    scores = n_tokens  # a block's terms are as wide as its keys, and half as many numbers as a row
    assert peak_beyond(take_in) < 1.1 * (at_once + scores) * ROWS / (BUDGET + 1)

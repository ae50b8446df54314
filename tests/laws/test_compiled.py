"""`compiled` takes a step at any fill: it gives what the step itself gives, and stops tracing once nothing changes."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import BUDGET, CASES, D_V, Case, D, H, by_proxy_and_queries

import velox_fn
from velox_fn import compiled, streaming_llm
from velox_fn.testing import block, positions

N = 44  # tokens: well over budget, and past every warm-up of these cases
KEYS, VALUES, QUERIES = block(N)


def fed(step: Any, state: Any, n_prompt: int, proxy: bool) -> tuple[list[int], Any, list[mx.array]]:
    """Rows of each view, the last state, and all views."""
    rows, views = [], []
    start = 0
    for stop in (*([n_prompt] if n_prompt else []), *range(n_prompt + 1, N + 1)):
        queries = None if proxy else QUERIES[:, :, start:stop]
        state, view = step(state, KEYS[:, :, start:stop], VALUES[:, :, start:stop], queries=queries)
        mx.eval(*view)
        rows.append(view[0].shape[2])
        views += view
        start = stop
    return rows, state, views


@pytest.mark.parametrize("n_prompt", [0, BUDGET - 6], ids=["from the first token", "after a prompt"])
@by_proxy_and_queries(CASES)
def test_a_compiled_step_gives_what_the_step_gives_at_every_fill(case: Case, proxy: bool, n_prompt: int) -> None:
    method = case.make()
    calls = 0

    def step(state: Any, keys: mx.array, values: mx.array, queries: mx.array | None = None) -> Any:
        nonlocal calls
        calls += 1
        return method.update(state, keys, values, queries=queries)

    state = method.init(1, H, D, D_V)
    rows, eager, views = fed(method.update, state, n_prompt, proxy)
    found_rows, found, found_views = fed(compiled(step), state, n_prompt, proxy)
    assert found_rows == rows
    np.testing.assert_array_equal(positions(found), positions(eager))
    assert found.store.seen_by_all == eager.store.seen_by_all == N
    for one, other in zip(found_views, views, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5)
    assert calls < N - n_prompt - 5  # over budget nothing runs in Python any more


def test_steps_at_intervals_run_as_they_are() -> None:
    method = streaming_llm(budget=BUDGET, interval=4)
    state = method.init(1, H, D, D_V)
    rows, eager, _ = fed(method.update, state, 0, True)
    found_rows, found, _ = fed(compiled(method.update), state, 0, True)
    assert found_rows == rows
    np.testing.assert_array_equal(positions(found), positions(eager))


def test_a_step_of_ones_own_may_carry_a_state_of_each_layer() -> None:
    methods = [velox_fn.l2norm(budget=BUDGET), velox_fn.h2o(budget=12, grace=4)]

    def step(states: tuple[Any, ...], keys: mx.array, values: mx.array, *, queries: mx.array) -> Any:
        after, outs = [], []
        for method, state in zip(methods, states, strict=True):
            state, view = method.update(state, keys, values, queries=queries)
            after.append(state)
            outs.append(mx.fast.scaled_dot_product_attention(queries, *view, scale=1.0))
        return tuple(after), {"out": outs}

    start = tuple(method.init(1, H, D, D_V) for method in methods)
    quick, states, same = compiled(step), start, start
    for t in range(N):
        given = KEYS[:, :, t, None], VALUES[:, :, t, None]
        states, found = quick(states, *given, queries=QUERIES[:, :, t, None])
        same, expected = step(same, *given, queries=QUERIES[:, :, t, None])
        for one, other in zip(found["out"], expected["out"], strict=True):
            np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5)
    for one, other in zip(states, same, strict=True):
        np.testing.assert_array_equal(positions(one), positions(other))


def test_a_trace_is_not_used_for_another_state_or_another_number_of_tokens() -> None:
    method = velox_fn.l2norm(budget=BUDGET)
    step = compiled(method.update)
    for batch, length in ((1, 1), (2, 1), (1, 3), (1, 1)):
        state = eager = method.init(batch, H, D, D_V)
        keys, values, _ = block(30, batch=batch)
        for t in range(0, 30, length):
            new = keys[:, :, t : t + length], values[:, :, t : t + length]
            state, _ = step(state, *new)
            eager, _ = method.update(eager, *new)
        np.testing.assert_array_equal(positions(state), positions(eager))


def test_few_traces_are_kept() -> None:
    method = velox_fn.l2norm(budget=BUDGET)
    step: Any = compiled(method.update)
    for dim in range(4, 24):
        state = method.init(1, 1, dim)
        for _ in range(BUDGET + 3):
            state, _ = step(state, mx.ones((1, 1, 1, dim)), mx.ones((1, 1, 1, dim)))
    assert len(step._traces) == 16


def test_counting_ends_with_an_error_in_a_compiled_step_too() -> None:
    method = velox_fn.l2norm(budget=BUDGET)
    step = compiled(method.update)
    _, state, _ = fed(step, method.init(1, H, D, D_V), 0, True)
    last = velox_fn.replaced(state.store, seen_by_all=2**31 - 1)
    with pytest.raises(ValueError, match=r"2\*\*31 - 1"):
        step(velox_fn.replaced(state, store=last), KEYS[:, :, :1], VALUES[:, :, :1])


def test_arrays_of_a_longer_state_are_refused_where_the_room_for_rows_has_grown() -> None:
    method = streaming_llm(budget=600)
    early, _ = method.update(method.init(1, H, D, D_V), KEYS, VALUES)
    late = early
    for _ in range(6):
        late, _ = method.update(late, KEYS, VALUES)
    with pytest.raises(ValueError, match=r"rows in use.*velox_fn\.compiled"):
        velox_fn.with_arrays(early, velox_fn.arrays(late))

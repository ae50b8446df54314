"""What holds for every method when rows leave at intervals only."""

import dataclasses
import operator
from typing import Any

import cases
import mlx.core as mx
import numpy as np
import pytest
from cases import BUDGET, CASES, D_V, Case, D, H
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_fn import Eviction, arrays, at_intervals, interval_parts, kept_bytes, kept_positions, kv, with_arrays
from velox_fn.engine.batch import merge, take, trim
from velox_fn.testing import bits, block, fed

INTERVAL, N_TOKENS = 5, 63
WITHOUT_ROLLBACK = [case for case in CASES if not case.arguments.get("rollback")]
every_method = pytest.mark.parametrize("case", WITHOUT_ROLLBACK, ids=str)
by_proxy_and_queries = cases.by_proxy_and_queries(WITHOUT_ROLLBACK)
TOKENS = block(N_TOKENS, seed=3)


def followed(
    method: Eviction,
    calls: list[int],
    *,
    tokens: tuple[mx.array, ...] = TOKENS,
    state: Any = None,
    start: int = 0,
    proxy: bool = True,
) -> tuple[Any, list[tuple[np.ndarray, ...]]]:
    """The state after these calls, cut where they must be, and what each token saw: bits of keys and values."""
    keys, values, queries = tokens
    state, seen = method.init(keys.shape[0], H, D, D_V, keys.dtype) if state is None else state, []
    for n_tokens in calls:
        for part in interval_parts(start, n_tokens, method.settings["interval"]):
            at = slice(start, start + part)
            given = None if proxy else queries[:, :, at]
            state, view = method.update(state, keys[:, :, at], values[:, :, at], queries=given)
            n_rows = view[0].shape[2] - part
            seen += [tuple(bits(half[:, :, : n_rows + t + 1]) for half in view) for t in range(part)]
            start += part
    return state, seen


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip((*kv(one), kept_positions(one)), (*kv(other), kept_positions(other)), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@by_proxy_and_queries
@pytest.mark.parametrize(
    "dtype",
    [mx.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (mx.float32, mx.float16))],
    ids=str,
)
def test_what_a_token_sees_and_what_is_kept_does_not_depend_on_the_cuts(
    case: Case, proxy: bool, dtype: mx.Dtype
) -> None:
    method, tokens = case.make(interval=INTERVAL), tuple(part.astype(dtype) for part in TOKENS)
    one_by_one, seen = followed(method, [1] * N_TOKENS, tokens=tokens, proxy=proxy)
    for calls in ([N_TOKENS], [7] * 9, [40, 1, 1, 21]):
        state, views = followed(method, calls, tokens=tokens, proxy=proxy)
        assert_same(state, one_by_one)
        for view, expected in zip(views, seen, strict=True):
            for half, other in zip(view, expected, strict=True):
                np.testing.assert_array_equal(half, other)


@by_proxy_and_queries
def test_at_a_boundary_the_method_is_given_the_interval_as_one_block(case: Case, proxy: bool) -> None:
    # The method itself, which evicts after each block, is the oracle.
    boundary = N_TOKENS // INTERVAL * INTERVAL
    by_blocks = fed(case.make(), TOKENS, [INTERVAL] * (boundary // INTERVAL), proxy=proxy)
    state, _ = followed(case.make(interval=INTERVAL), [boundary + 1], proxy=proxy)
    for kept, expected in zip(
        (*kv(state), kept_positions(state)), (*kv(by_blocks), kept_positions(by_blocks)), strict=True
    ):
        np.testing.assert_array_equal(bits(kept[:, :, :-1]), bits(expected))
    assert (np.array(kept_positions(state))[..., -1] == boundary).all()


@every_method
def test_at_most_budget_and_interval_rows_are_held(case: Case) -> None:
    method = case.make(interval=INTERVAL)
    state = method.init(1, H, D, D_V)
    for t in range(N_TOKENS):
        keys, values = (part[:, :, t : t + 1] for part in TOKENS[:2])
        state, view = method.update(state, keys, values)
        n_rows = kept_positions(state).shape[2]
        assert view[0].shape[2] == n_rows <= max(BUDGET, case.warm_up) + INTERVAL
        assert arrays(state)[0].shape[2] <= max(BUDGET, case.warm_up) + INTERVAL
        assert state.store.offset.tolist() == [t + 1]
    assert n_rows == BUDGET + N_TOKENS % INTERVAL
    row = H * (D + D_V) * 4
    assert 0 <= kept_bytes(state) - n_rows * row == kept_bytes(case.make().init(1, H, D, D_V))


@by_proxy_and_queries
def test_each_sequence_of_a_ragged_batch_has_its_own_boundaries(case: Case, proxy: bool) -> None:
    method, lengths = case.make(interval=INTERVAL), [12, 31, 27, 3]
    state, seen = merge([followed(method, [n], proxy=proxy)[0] for n in lengths]), tuple(lengths)
    for call in [(1, 1, 1, 1)] * 9 + [(2, 0, 1, 2), (1, 1, 1, 1), (1, 2, 0, 1)]:
        left = call
        for part in interval_parts(seen, call, INTERVAL):
            real = tuple(min(part, n) for n in left)
            keys, values, queries = (next_tokens(whole, seen, part, real) for whole in TOKENS)
            state, view = method.update(state, keys, values, queries=None if proxy else queries, valid=real)
            assert all(mx.isfinite(half).all().item() for half in view), "padding reaches attention"
            seen, left = (tuple(map(operator.add, seen, real)), tuple(map(operator.sub, left, real)))
    for b, n in enumerate(seen):
        assert_same(take(state, [b]), followed(method, [n], proxy=proxy)[0])


def next_tokens(whole: mx.array, seen: tuple[int, ...], n_tokens: int, real: tuple[int, ...]) -> mx.array:
    """The next tokens of each sequence, and NaN past the real ones."""
    rows = mx.concatenate([whole[:, :, n : n + n_tokens] for n in seen])
    return mx.where((mx.arange(n_tokens) < mx.array(real)[:, None])[:, None, :, None], rows, mx.nan)


@by_proxy_and_queries
def test_tokens_since_the_boundary_can_be_taken_back(case: Case, proxy: bool) -> None:
    method = case.make(interval=INTERVAL)
    before, _ = followed(method, [42], proxy=proxy)
    there, _ = followed(method, [3], state=before, start=42, proxy=proxy)
    other = tuple(mx.concatenate([part[:, :, :42], part[:, :, :21]], axis=2) for part in TOKENS)
    state = taken_back(there, 3)
    assert_same(state, before)
    again, _ = followed(method, [12], state=state, start=42, tokens=other, proxy=proxy)
    never, _ = followed(method, [54], tokens=other, proxy=proxy)
    assert_same(again, never)
    with pytest.raises(ValueError, match="since the last boundary"):
        taken_back(there, 6)


def taken_back(state: Any, n_tokens: int) -> Any:
    return dataclasses.replace(state, store=trim(state.store, n_tokens))


@every_method
def test_a_block_across_a_boundary_is_refused_and_nothing_is_lost(case: Case) -> None:
    method = case.make(interval=INTERVAL)
    state, _ = followed(method, [23])
    keys, values, _ = block(4)
    with pytest.raises(ValueError, match=r"parts of \(2, 2\) tokens"):
        method.update(state, keys, values)
    assert_same(state, followed(method, [23])[0])


@by_proxy_and_queries
@pytest.mark.parametrize("seen", [0, 22, 40], ids=str)
def test_an_update_traces_and_leaves_no_array_behind(case: Case, proxy: bool, seen: int) -> None:
    method = case.make(interval=INTERVAL)
    state, _ = followed(method, [seen] if seen else [], proxy=proxy)
    keys, values, queries = (part[:, :, seen : seen + 2] for part in TOKENS)

    def step(leaves: list[mx.array], keys: mx.array, values: mx.array, queries: mx.array) -> list[mx.array]:
        after, view = method.update(with_arrays(state, leaves), keys, values, queries=None if proxy else queries)
        return arrays(after) + list(view)

    expected = step(arrays(state), keys, values, queries)
    found = mx.compile(step)(arrays(state), keys, values, queries)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@given(seen=st.lists(st.integers(0, 99), min_size=1, max_size=4), n=st.integers(1, 70), interval=st.integers(1, 20))
@settings(max_examples=60)
def test_parts_cross_no_boundary_and_are_as_long_as_they_can_be(seen: list[int], n: int, interval: int) -> None:
    parts = interval_parts(seen, n, interval)
    assert sum(parts) == n
    starts = np.cumsum([0, *parts])
    boundaries = {t for t in range(1, n) if any((so_far + t) % interval == 0 for so_far in seen)}
    assert set(starts[1:-1].tolist()) == boundaries
    assert interval_parts(np.int64(seen[0]), np.int64(n), interval) == interval_parts(seen[:1], n, interval)


@every_method
def test_an_interval_of_one_is_the_method_itself(case: Case) -> None:
    plain, named = case.make(), case.make(interval=1)
    assert plain.settings["interval"] == named.settings["interval"] == 1
    assert_same(fed(plain, TOKENS, [30, 1, 1]), fed(named, TOKENS, [30, 1, 1]))


@pytest.mark.parametrize("interval", [0, -1, 2.0, True, "8"])
def test_an_interval_that_is_no_whole_number_is_refused(interval: Any) -> None:
    for case in CASES:
        with pytest.raises(ValueError, match="interval must be"):
            case.make(interval=interval)
    with pytest.raises(ValueError, match="interval must be"):
        interval_parts(5, 20, interval)


def test_rollback_and_interval_exclude_each_other() -> None:
    for case in CASES:
        if case.arguments.get("rollback"):
            with pytest.raises(ValueError, match="leave rollback out"):
                case.make(interval=8)


def test_queries_must_come_for_all_blocks_or_for_none() -> None:
    method = next(case for case in CASES if case.method == "h2o").make(interval=INTERVAL)
    state, _ = followed(method, [7])
    keys, values, queries = block(1)
    with pytest.raises(ValueError, match="give them for every block, or for none"):
        method.update(state, keys, values, queries=queries)


def test_counts_on_the_device_are_refused() -> None:
    method = at_intervals(CASES[0].make(), INTERVAL)
    keys, values, _ = block(2, batch=2)
    with pytest.raises(ValueError, match="without waiting for the device"):
        method.update(method.init(2, H, D, D_V), keys, values, valid=mx.array([1, 2], mx.int32))

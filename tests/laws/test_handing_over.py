"""`hand_over`: a method goes on with the rows that another one keeps, each at its true position."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import BUDGET, CASES, D_V, N_SINK, STATIC, Case, D, H

from velox_fn import Eviction, cur, h2o, hand_over, keydiff, kv, l2norm, qfilters, snapkv, streaming_llm
from velox_fn.engine.select import rank_positions, rank_scores
from velox_fn.engine.store import kept_rows
from velox_fn.testing import block, positions

N, MORE = 40, 12
KEYS, VALUES, QUERIES = block(N + MORE)
FIRST = l2norm(budget=BUDGET, n_sink=N_SINK, recent=3)
GOES_ON = [case for case in CASES if case.make().observation is not None or case.make().arrival is not None]
GOES_ON = [case for case in GOES_ON if case.label not in ("rollback", "fallback", "fallback over budget")]


def read(method: Eviction, state: Any, start: int, stop: int) -> Any:
    """`state` after these tokens one by one, with their queries."""
    for t in range(start, stop):
        token = (array[:, :, t : t + 1] for array in (KEYS, VALUES))
        state, view = method.update(state, *token, queries=QUERIES[:, :, t : t + 1])
        mx.eval(*view)
    return state


def prompt(method: Eviction = FIRST, n_tokens: int = N) -> Any:
    return method.update(method.init(1, H, D, D_V), KEYS[:, :, :n_tokens], VALUES[:, :, :n_tokens])[0]


@pytest.mark.parametrize("case", [case for case in GOES_ON if case in STATIC], ids=str)
def test_a_static_method_handed_its_own_rows_goes_on_as_it_would_have(case: Case) -> None:
    method = case.make()
    expected = read(method, prompt(method), N, N + MORE)
    found = read(method, hand_over(prompt(method), method), N, N + MORE)
    assert np.array_equal(positions(found), positions(expected))
    for one, other in zip(kv(found), kv(expected), strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("case", [case for case in GOES_ON if case in STATIC], ids=str)
def test_the_rows_of_another_method_are_scored_at_their_true_positions(case: Case) -> None:
    method, wide = case.make(), 4 * BUDGET
    aged = {name: 4 * array for name, array in case.arguments.items() if name == "score_age"}  # it counts in budgets
    all_rows = case.make(budget=wide, **aged)
    scored = all_rows.scored(read(all_rows, all_rows.init(1, H, D, D_V), 0, N + MORE)).store
    ranks, at = np.array(scored.ranks[0]), np.array(rank_positions(scored.ranks[0]))
    rank_of = [dict(zip(at[h].tolist(), ranks[h].tolist(), strict=True)) for h in range(H)]
    recent = method.settings.get("recent", 0)
    handed = hand_over(prompt(), method)
    assert np.array_equal(positions(handed), positions(prompt()))
    kept = [set(positions(prompt())[0, h].tolist()) for h in range(H)]
    for h in range(H):
        for t in range(N, N + MORE):
            kept[h].add(t)
            kept[h].remove(min((one for one in kept[h] if one <= t - recent), key=rank_of[h].__getitem__))
    assert positions(read(method, handed, N, N + MORE))[0].tolist() == [sorted(rows) for rows in kept]


@pytest.mark.parametrize("case", [case for case in GOES_ON if case not in STATIC], ids=str)
def test_what_scores_by_attention_goes_on_in_its_budget(case: Case) -> None:
    method = case.make()
    handed = hand_over(prompt(), method)
    assert np.array_equal(positions(handed), positions(prompt()))
    state = read(method, handed, N, N + MORE)
    allowed = [set(positions(prompt())[0, h].tolist()) | set(range(N, N + MORE)) for h in range(H)]
    kept = positions(state)[0].tolist()
    recent = next((method.settings[name] for name in ("grace", "obs_window", "recent") if name in method.settings), 0)
    assert state.store.offset.tolist() == [N + MORE]
    for h in range(H):
        assert len(kept[h]) == BUDGET
        assert {*range(N_SINK), *range(N + MORE - recent, N + MORE)} <= set(kept[h]) <= allowed[h]


def test_attention_since_then_decides_what_h2o_keeps() -> None:
    method = h2o(budget=BUDGET, n_sink=N_SINK, grace=3)
    found = positions(read(method, hand_over(prompt(), method), N, N + MORE))[0]
    keys, queries = np.array(KEYS[0], np.float64), np.array(QUERIES[0], np.float64).reshape(H, -1, N + MORE, D)
    for h in range(H):
        mass = dict.fromkeys(positions(prompt())[0, h].tolist(), 0.0)
        for t in range(N, N + MORE):
            mass[t] = 0.0
            rows = list(mass)
            logits = queries[h, :, t] @ keys[h, rows].T / np.sqrt(D)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            for row, weight in zip(rows, (weights / weights.sum(-1, keepdims=True)).sum(0), strict=True):
                mass[row] += weight
            del mass[min((row for row in rows if N_SINK <= row <= t - 3), key=mass.__getitem__)]
        assert found[h].tolist() == sorted(mass)


def test_rows_are_renumbered_from_their_true_positions() -> None:
    [case] = [case for case in CASES if str(case) == "streaming_llm renumbered"]
    method, first = case.make(), streaming_llm(budget=BUDGET, n_sink=N_SINK)
    token = KEYS[:, :, N : N + 1], VALUES[:, :, N : N + 1]
    _, expected = method.update(prompt(method), *token)
    _, found = method.update(hand_over(prompt(first), method), *token)
    assert mx.allclose(found[0].sum(2), expected[0].sum(2), atol=1e-5)


@pytest.mark.parametrize("method", [h2o(budget=BUDGET, n_sink=N_SINK, grace=3), FIRST], ids=["h2o", "l2norm"])
def test_sequences_of_a_ragged_batch_go_on_as_they_do_alone(method: Eviction) -> None:
    lengths = (N, 9)
    both = [mx.concatenate([array] * 2, axis=0) for array in (KEYS, VALUES, QUERIES)]
    state, _ = FIRST.update(
        FIRST.init(2, H, D, D_V), both[0][:, :, :N], both[1][:, :, :N], valid=mx.array(lengths, mx.int32)
    )
    state = hand_over(state, method)
    alone = [hand_over(prompt(n_tokens=n), method) for n in lengths]
    for t in range(N, N + MORE):
        token = [array[:, :, t : t + 1] for array in both]
        state, _ = method.update(state, token[0], token[1], queries=token[2])
    for b in range(2):
        expected = positions(read(method, alone[b], N, N + MORE))[0]
        assert [row[row >= 0].tolist() for row in positions(state)[b]] == expected.tolist()


def test_padding_of_a_short_sequence_does_not_part_its_rows() -> None:
    method = snapkv(budget=BUDGET, n_sink=N_SINK, obs_window=4, kernel=3)  # which averages over neighbours
    keys, values, queries = (mx.concatenate([array] * 2, axis=0) for array in (KEYS, VALUES, QUERIES))
    both, _ = FIRST.update(FIRST.init(2, H, D, D_V), keys[:, :, :N], values[:, :, :N], valid=mx.array((N, 9), mx.int32))
    scores = []
    for state in (both, prompt(n_tokens=9)):
        k, v, q = (part[: state.store.offset.size, :, N : N + 6] for part in (keys, values, queries))
        state, _ = method.update(hand_over(state, method), k, v, queries=q)
        scores.append(np.array(rank_scores(kept_rows(state.store).ranks)[-1, :, :15]))
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-6)


def test_within_the_budget_any_method_goes_on_with_all_rows() -> None:
    method = streaming_llm(budget=2 * BUDGET)
    state = read(method, hand_over(prompt(n_tokens=BUDGET), method), BUDGET, N + MORE)
    assert np.array_equal(positions(state), positions(read(method, method.init(1, H, D, D_V), 0, N + MORE)))


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (h2o(budget=BUDGET - 4, grace=3), f"{BUDGET} rows are kept.*budget={BUDGET} and no rollback"),
        (h2o(budget=BUDGET + 4, grace=3), f"{BUDGET} rows are kept.*budget={BUDGET} and no rollback"),
        (l2norm(budget=BUDGET, rollback=2), "no rollback"),
        (l2norm(budget=BUDGET, interval=4), "interval=1"),
        (keydiff(budget=BUDGET), "gathers"),
        (cur(budget=BUDGET), "gathers"),
        (qfilters(budget=BUDGET, calib_tokens=6), "calibrated arrays"),
        (qfilters(budget=BUDGET), "calibrated arrays"),
    ],
)
def test_what_cannot_go_on_is_refused(method: Eviction, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hand_over(prompt(), method)


def test_the_state_so_far_stays_usable() -> None:
    state = prompt()
    before = [np.array(array) for array in kv(state)]
    read(FIRST, hand_over(state, FIRST), N, N + MORE)
    assert all(np.array_equal(one, np.array(other)) for one, other in zip(before, kv(state), strict=True))
    assert np.array_equal(positions(read(FIRST, state, N, N + MORE)), positions(read(FIRST, prompt(), N, N + MORE)))


def test_a_name_is_no_method_to_hand_over_to() -> None:
    with pytest.raises(ValueError, match="method must be an Eviction, got 'h2o'; make it first, as h2o"):
        hand_over(FIRST.init(1, H, D, D_V), "h2o")  # type: ignore[arg-type]

"""What holds for every method when positions are pinned."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import BUDGET, CASES, D_V, N_SINK, Case, D, H

from velox_fn import arrays, kept_positions, pinned_state
from velox_fn.engine.batch import merge, take, trim
from velox_fn.engine.records import replaced, statics, with_statics
from velox_fn.engine.select import rank_positions, rank_scores
from velox_fn.testing import block, fed

PINNED, PINNED_POSITIONS = [(4, 7), (20, 22)], [4, 5, 6, 20, 21]
N_TOKENS = 60
TOKENS = block(N_TOKENS, seed=5)
every_method = pytest.mark.parametrize("case", CASES, ids=str)
at_once_and_at_intervals = pytest.mark.parametrize("interval", [1, 5], ids="interval={}".format)


def positions(state: Any) -> np.ndarray:
    return np.array(kept_positions(state))


def usable(case: Case, interval: int) -> None:
    if interval > 1 and case.arguments.get("rollback"):
        pytest.skip("rollback and interval exclude each other")


@every_method
@at_once_and_at_intervals
def test_pinned_rows_are_never_missing(case: Case, interval: int) -> None:
    usable(case, interval)
    method = case.make(pinned=PINNED, interval=interval)
    calls = [1] * N_TOKENS if interval > 1 else [9, *[1] * 25, 20, *[1] * 6]
    state = method.init(1, H, D, D_V)
    seen = 0
    for n in calls:
        keys, values = (part[:, :, seen : seen + n] for part in TOKENS[:2])
        state, _ = method.update(state, keys, values)
        seen += n
        expected = [at for at in (*range(N_SINK), *PINNED_POSITIONS) if at < seen]
        for head in positions(state)[0]:
            assert np.isin(expected, head).all(), f"after {seen} tokens {head} lacks some of {expected}"
    assert positions(state).shape[2] <= max(BUDGET, case.warm_up) + (interval if interval > 1 else 0)


@every_method
def test_the_rest_of_the_kept_set_is_that_of_the_highest_scores(case: Case) -> None:
    # The scores are those of rows of which none has left; choosing among them is done here.
    if case.arguments.get("granularity") == "token":
        pytest.skip("each of its tokens is chosen among by itself")
    room = 4 * N_TOKENS
    age = {name: array * (room / BUDGET) for name, array in case.arguments.items() if name == "score_age"}
    method, roomy = case.make(pinned=PINNED), case.make(budget=room, **age)  # age counts in budgets
    whole = roomy.scored(fed(roomy, TOKENS, [N_TOKENS])).store
    scores = np.array(rank_scores(whole.ranks))[0, :, :N_TOKENS]
    at = np.array(rank_positions(whole.ranks))[0, :, :N_TOKENS]
    found = positions(fed(method, TOKENS, [N_TOKENS]))[0]
    newest_first = -1 if case.method == "streaming_llm" else 1
    stays = {*range(N_SINK), *PINNED_POSITIONS, *range(N_TOKENS - whole.recent, N_TOKENS)}
    for kept, score, position in zip(found, scores, at, strict=True):
        others = [i for i in range(N_TOKENS) if position[i] not in stays]
        best = sorted(others, key=lambda i: (-score[i], newest_first * position[i]))[: BUDGET - len(stays)]
        assert sorted(kept.tolist()) == sorted({*stays, *(int(position[i]) for i in best)})


@every_method
@at_once_and_at_intervals
def test_each_sequence_of_a_batch_keeps_the_positions_that_are_pinned_for_it(case: Case, interval: int) -> None:
    usable(case, interval)
    method, lengths = case.make(interval=interval), (40, 33, 30)
    pins: list[list[tuple[int, int]]] = [[(3, 6)], [], [(8, 9), (20, 23)]]
    alone = []
    for n, own in zip(lengths, pins, strict=True):
        state = pinned_state(method.init(1, H, D, D_V), own)
        for t in range(n):
            state, _ = method.update(state, *(part[:, :, t : t + 1] for part in TOKENS[:2]))
        alone.append(state)
    state = merge([method.scored(one) for one in alone])
    for t in range(12):
        following = [mx.concatenate([part[:, :, n + t : n + t + 1] for n in lengths]) for part in TOKENS[:2]]
        state, _ = method.update(state, *following)
        for b, n in enumerate(lengths):
            alone[b], _ = method.update(alone[b], *(part[:, :, n + t : n + t + 1] for part in TOKENS[:2]))
    state = take(method.scored(state), [2, 0, 1])
    for row, b in enumerate([2, 0, 1]):
        found, expected = positions(state)[row], positions(alone[b])[0]
        for head, kept in zip(found, expected, strict=True):
            assert [at for at in head if at >= 0] == kept.tolist()
            assert np.isin([at for start, stop in pins[b] for at in range(start, stop)], head).all()


@every_method
def test_what_is_pinned_is_saved_with_the_rows(case: Case) -> None:
    method = case.make(pinned=PINNED)
    state = fed(method, TOKENS, [30])
    plain = replaced(state, store=replaced(state.store, pinned=()))
    in_json = {**statics(state), "store": {**statics(state.store), "pinned": [[list(one) for one in PINNED]]}}
    assert with_statics(plain, in_json).store.pinned == state.store.pinned == (tuple(PINNED),)
    assert len(arrays(state)) == len(arrays(fed(case.make(), TOKENS, [30])))


@pytest.mark.parametrize("case", [case for case in CASES if case.arguments.get("rollback")], ids=str)
def test_taking_tokens_back_leaves_pinned_rows(case: Case) -> None:
    method = case.make(pinned=PINNED)
    state = fed(method, TOKENS, [50, 1, 1, 1])
    back = replaced(state, store=trim(state.store, 3))
    np.testing.assert_array_equal(positions(back), positions(fed(method, TOKENS, [50])))


@every_method
@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        ([(0, BUDGET)], "fills the budget of 16"),
        ([(2, 9), (30, 39)], "raise budget by at least"),
        ([(5, 5)], "must be at least 6, got 5"),
        ([(-1, 5)], "start of a pinned range must be at least 0"),
        ([(1, 2.5)], "must be a whole number"),
        ([7], "a pair of its first position and the one after its last"),
        ("0:12", "a list of position ranges"),
        (12, "a list of position ranges"),
    ],
    ids=str,
)
def test_ranges_that_cannot_work_are_refused_at_construction(case: Case, pinned: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        case.make(pinned=pinned)


@every_method
def test_ranges_are_counted_once_where_they_overlap_each_other_and_the_sinks(case: Case) -> None:
    method = case.make(pinned=[(0, 5), (3, 7), (7, 8)])
    assert method.settings["pinned"] == [[0, 8]]
    assert case.make(pinned=[[0, 8]]).settings == method.settings

"""What holds for every method when its rows leave in chunks."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import BUDGET, CASES, D_V, N_SINK, Case, D, H

from velox_fn import chunked, interval_parts, kept_positions
from velox_fn.engine.batch import merge
from velox_fn.engine.select import rank_positions, rank_scores
from velox_fn.testing import block, fed

CHUNK, N_TOKENS = 3, 40
TOKENS = block(64, seed=8)
IN_CHUNKS = [
    case for case in CASES if not case.arguments.get("rollback") and case.arguments.get("granularity") != "token"
]
every_method = pytest.mark.parametrize("case", IN_CHUNKS, ids=str)


def followed(case: Case, calls: list[int], *, interval: int = 5) -> Any:
    method = chunked(case.make(interval=interval), CHUNK)
    parts, seen = [], 0
    for n in calls:
        parts += interval_parts(seen, n, interval)
        seen += n
    return fed(method, TOKENS, parts)


@every_method
def test_chunks_stay_by_the_mean_of_the_scores_of_their_rows(case: Case) -> None:
    # The scores are those of rows of which none has left; choosing among them is done here.
    room = 4 * N_TOKENS
    age = {name: array * (room / BUDGET) for name, array in case.arguments.items() if name == "score_age"}
    roomy = case.make(budget=room, **age)  # age counts in budgets
    whole = roomy.scored(fed(roomy, TOKENS, [N_TOKENS])).store
    scores = np.array(rank_scores(whole.ranks))[0, :, :N_TOKENS]
    at = np.array(rank_positions(whole.ranks))[0, :, :N_TOKENS]
    found = np.array(kept_positions(followed(case, [N_TOKENS, 1], interval=N_TOKENS)))[0, :, :-1]
    newest_first = -1 if (np.array(whole.ranks)[0, 0, 0] & 0xFFFFFFFF) > 2**31 else 1  # as its ties are broken
    stays = {*range(N_SINK), *range(N_TOKENS - whole.recent, N_TOKENS)}
    for kept, score, position in zip(found, scores, at, strict=True):
        rest = {int(p): s for p, s in zip(position, score, strict=True) if p not in stays}
        means = {c: np.mean([s for p, s in rest.items() if p // CHUNK == c]) for c in {p // CHUNK for p in rest}}
        best = sorted(rest, key=lambda p: (-means[p // CHUNK], newest_first * p))[: BUDGET - len(stays)]
        assert kept.tolist() == sorted([*stays, *best])


@every_method
def test_the_kept_set_does_not_depend_on_the_cuts(case: Case) -> None:
    at_once = np.array(kept_positions(followed(case, [64])))
    for calls in ([1] * 64, [7, 30, 1, 26]):
        np.testing.assert_array_equal(np.array(kept_positions(followed(case, calls))), at_once)


@every_method
def test_a_sequence_of_a_ragged_batch_keeps_what_it_keeps_alone(case: Case) -> None:
    method, lengths = chunked(case.make(interval=5), CHUNK), (41, 33)
    alone = [followed(case, [n]) for n in lengths]
    state = merge([method.scored(one) for one in alone])
    for t in range(12):
        following = [mx.concatenate([part[:, :, n + t : n + t + 1] for n in lengths]) for part in TOKENS[:2]]
        state, _ = method.update(state, *following)
        for b, n in enumerate(lengths):
            alone[b], _ = method.update(alone[b], *(part[:, :, n + t : n + t + 1] for part in TOKENS[:2]))
    for row, one in zip(np.array(kept_positions(state)), alone, strict=True):
        expected = np.array(kept_positions(one))[0]
        assert [[p for p in head if p >= 0] for head in row.tolist()] == expected.tolist()


def test_states_of_other_chunks_do_not_merge() -> None:
    made = [chunked(IN_CHUNKS[0].make(interval=5), n).init(1, H, D, D_V) for n in (2, 3)]
    with pytest.raises(ValueError, match="chunk"):
        merge(made)

"""The agent session: replies from reused caches are those from the whole prompt, and most of each prompt is reused."""

from typing import Any

import pytest

import velox_cache as vc
from velox_cache.evaluation.agent_session import Script, Turn, agent_session

BUDGET, INTERVAL, N_RESULT, N_REPLY, N_DROPPED = 40, 16, 50, 10, 6
SCRIPT = Script(
    opening=range(3, 15),
    results=[[(7 * turn + i * i) % 60 for i in range(N_RESULT)] for turn in range(5)],
    before_reply=(1, 2),
    after_reply=(2, 1),
)


def session(model: Any, snapshots: int, method: str = "l2norm") -> list[Turn]:
    vc.install(model, method, budget=BUDGET, interval=INTERVAL, snapshots=snapshots)
    return agent_session(model, SCRIPT, n_reply=N_REPLY, n_reasoning=N_DROPPED)


def shared_with_the_last(turns: list[Turn]) -> list[tuple[int, int]]:
    """Of each turn but the first: tokens that the store held, and of the prompt's beginning those among them."""
    found, history, held = [], list(SCRIPT.opening), []
    for turn, result in zip(turns, [[], *SCRIPT.results], strict=True):
        prompt = [*history, *result, *SCRIPT.before_reply]
        assert turn.prompt == len(prompt)
        alike = (i for i, (one, other) in enumerate(zip(held, prompt, strict=False)) if one != other)
        found.append((len(held), next(alike, len(held))))
        held = [*prompt, *turn.reply]
        history = [*prompt, *turn.reply[N_DROPPED:], *SCRIPT.after_reply]
    return found[1:]


@pytest.mark.parametrize("method", ["l2norm", "h2o"])
def test_with_a_snapshot_a_turn_prefills_what_is_new_and_replies_alike(tiny_model: Any, method: str) -> None:
    turns = session(tiny_model(), 1, method)
    assert all(turn.same for turn in turns)
    for turn, (_, shared) in zip(turns[1:], shared_with_the_last(turns), strict=True):
        assert turn.prefilled == turn.prompt - shared <= N_RESULT + N_REPLY


def test_without_a_snapshot_a_cache_reaches_back_to_its_last_boundary(tiny_model: Any) -> None:
    turns = session(tiny_model(), 0)
    assert all(turn.same for turn in turns)
    reached = []
    for turn, (held, shared) in zip(turns[1:], shared_with_the_last(turns), strict=True):
        last_boundary = (held - 1) // INTERVAL * INTERVAL  # a boundary cuts when the next token comes
        reached.append(held <= BUDGET or shared >= last_boundary)
        assert turn.prefilled == turn.prompt - (shared if reached[-1] else 0)
    assert set(reached) == {True, False}

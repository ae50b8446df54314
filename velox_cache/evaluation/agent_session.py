"""A scripted agent session: how much of each prompt the server's store of prompt caches spares, and at what price.

Every turn's prompt is the conversation so far, with a tool's result at its end. The template drops the reasoning that a
reply began with, as those of reasoning models do, so a prompt goes on from the last prompt and not from the last reply:
a stored cache must be taken back over the reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.serving.prompt_prefixes import PromptPrefixes


@dataclass(frozen=True)
class Script:
    """What a session says, in tokens."""

    opening: Sequence[int]  # the system message and the task
    results: Sequence[Sequence[int]]  # of tools, one before each reply but the first
    before_reply: Sequence[int]  # what the template puts there
    after_reply: Sequence[int]


@dataclass(frozen=True)
class Turn:
    """One prompt and its reply, with the store and without."""

    turn: int
    prompt: int  # tokens
    prefilled: int  # of these, with the store
    reply: tuple[int, ...]
    same: bool  # as the reply computed from the whole prompt, token for token


def agent_session(model: nn.Module, script: Script, *, n_reply: int, n_reasoning: int) -> list[Turn]:
    """Run the session on `model` with the caches that are installed in it: each reply warm and cold, greedily.

    n_reply: tokens of each reply, of which the template drops the first `n_reasoning`.
    """
    store, history, turns = PromptPrefixes(), list(script.opening), []
    for number, result in enumerate([[], *script.results]):
        prompt = [*history, *result, *script.before_reply]
        cache, rest = store.fetch_nearest_cache("model", prompt)
        cache = make_prompt_cache(model) if cache is None else cache
        reply = _reply(model, rest, cache, n_reply)
        store.insert_cache("model", [*prompt, *reply], cache)
        cold = reply if len(rest) == len(prompt) else _reply(model, prompt, make_prompt_cache(model), n_reply)
        turns.append(Turn(number + 1, len(prompt), len(rest), tuple(reply), reply == cold))
        history = [*prompt, *reply[n_reasoning:], *script.after_reply]
    return turns


def _reply(model: nn.Module, tokens: Sequence[int], cache: list[Any], n_reply: int) -> list[int]:
    steps = generate_step(mx.array(list(tokens)), model, max_tokens=n_reply, prompt_cache=cache)
    return [int(token) for token, _ in steps]

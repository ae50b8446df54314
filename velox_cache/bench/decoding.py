"""Decoding under a model with each cache in turn, a few tokens at a time.

Whole runs of a cache lie minutes apart, and a shared machine changes its pace by a tenth in that time. Turns of half a
second are disturbed alike.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.bench.end_to_end import PROMPT, bench_prompt, cache_makers
from velox_cache.bench.rounds import Call, Comparison, compare
from velox_cache.installation.installing import uninstall
from velox_cache.introspection.query_tap import observe_queries

TOKENS = 8  # of a turn


def decoding_in_turns(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    *,
    budgets: tuple[int, ...],
    rounds: int,
    calibration: Any | None = None,
    methods: Sequence[str] | None = None,
    advance: Callable[[str], object] = print,
) -> Iterator[Comparison]:
    """Eight tokens decoded with each cache after the same prompt, beside RotatingKVCache; a comparison for each budget.

    The model ends up with its own caches.
    """
    prompt = mx.array(bench_prompt(tokenizer))[None]
    with observe_queries(model):
        for budget in budgets:
            arms: dict[str, Call] = {}
            makers = cache_makers(model, budget, calibration, methods)
            made = {label: make() for label, make in makers.items()}  # first: what cannot be made is said at once
            uninstall(model)
            for label, cache in made.items():
                advance(f"{label}, {budget}, in turns")
                mx.eval(model(prompt, cache=cache))
                arms[label] = partial(decode, model, cache)
            setting = f"{TOKENS} tokens, budget {budget}, after {PROMPT}"
            yield compare("decoding under the model", setting, arms, rounds=rounds)


def decode(model: nn.Module, cache: list[Any]) -> None:
    """A turn: tokens one after the other, each computed."""
    token = mx.zeros((1, 1), mx.int32)
    for _ in range(TOKENS):
        token = model(token, cache=cache)[:, -1:].argmax(-1)
        mx.eval(token)

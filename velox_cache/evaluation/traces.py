"""Long chains of steps, as a model that reasons writes them: what a cache loses as the text goes on and on.

Each kind is a template with true arithmetic, so that the next token is mostly known to a reader who remembers.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.evaluation.compare import Contender
from velox_cache.evaluation.context_runs import PromptCache, continued
from velox_cache.evaluation.words import NOUNS, PEOPLE
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.harness.side_by_side import side_by_side

N_PARTS = 8
"""A trace is reported in so many stretches of equal length."""
_N_GIVEN = 64  # tokens of a trace that are prefilled


def _accounts(rng: random.Random) -> Iterator[str]:
    """Payments between people, with the balances that follow."""
    people = rng.sample(PEOPLE, 5)
    balances = {person: rng.randrange(100, 900) for person in people}
    yield "Start: " + ", ".join(f"{person} has {balance}" for person, balance in balances.items()) + ".\n"
    for step in range(1, 10**6):
        giver, taker = rng.sample(people, 2)
        amount = rng.randrange(1, 40)
        before = balances[giver], balances[taker]
        balances[giver], balances[taker] = before[0] - amount, before[1] + amount
        yield (
            f"Step {step}: {giver} gives {amount} to {taker}. {giver}: {before[0]} - {amount} = {balances[giver]}. "
            f"{taker}: {before[1]} + {amount} = {balances[taker]}.\n"
        )


def _boxes(rng: random.Random) -> Iterator[str]:
    """Things that move between boxes, with what each box then holds."""
    things = rng.sample(NOUNS, 8)
    boxes: dict[str, list[str]] = {name: [] for name in "ABCD"}
    for thing in things:
        boxes[rng.choice("ABCD")].append(thing)
    yield "Start: " + "; ".join(f"box {name} holds {_listed(held)}" for name, held in boxes.items()) + ".\n"
    for step in range(1, 10**6):
        source = rng.choice([name for name, held in boxes.items() if held])
        target = rng.choice([name for name in boxes if name != source])
        thing = boxes[source].pop(rng.randrange(len(boxes[source])))
        boxes[target].append(thing)
        yield (
            f"Step {step}: move the {thing} from box {source} to box {target}. Now box {source} holds "
            f"{_listed(boxes[source])}, and box {target} holds {_listed(boxes[target])}.\n"
        )


def _listed(things: Sequence[str]) -> str:
    return ", ".join(things) or "nothing"


TRACES: Mapping[str, Callable[[random.Random], Iterator[str]]] = MappingProxyType(
    {"accounts": _accounts, "boxes": _boxes}
)
"""The kinds of traces: seeded generator -> endless lines."""


def make_trace(tokenizer: TokenizerWrapper, kind: str, half: str, number: int, length: int) -> list[int]:
    """`length` tokens of a trace; all choices come from the arguments."""
    text = ""
    for line in TRACES[kind](random.Random(f"{half} {kind} {number}")):
        text += line
        if len(text) > 6 * length:
            break
    return list(tokenizer.encode(text))[:length]


def run_trace(
    model: nn.Module,
    tokens: Sequence[int],
    contenders: Sequence[Contender],
    *,
    n_free: int,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> list[dict[str, Any]]:
    """Read a trace token by token under each arm; the first, the full cache, is what the others are held against.

    KL divergence and agreement for each eighth of it, and then, of `n_free` tokens generated greedily, the share of
    distinct 4-grams.
    """
    prefill = shared_prefill(model, tokens[:_N_GIVEN], advance=advance)
    caches = [prefill.into(one.make()) for one in contenders]
    divergences, same = continued(model, caches, tokens[_N_GIVEN:], advance)
    written = _free(model, caches, tokens[-1], n_free, advance)
    parts = [np.array_split(array, N_PARTS, axis=1) for array in (divergences, same)]
    return [
        {
            "kl_divergence": [float(part[i].mean(dtype=np.float64)) for part in parts[0]],
            "agreement": [float(part[i].mean()) for part in parts[1]],
            "distinct": distinct_share(written[i]),
        }
        for i in range(len(contenders))
    ]


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that are unlike all before them; 1 where nothing is said twice."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _free(
    model: nn.Module, caches: Sequence[PromptCache], last: int, n_tokens: int, advance: Callable[[int], object]
) -> list[list[int]]:
    tokens, found = [last] * len(caches), []
    with side_by_side(model, caches) as step:
        for _ in range(n_tokens):
            tokens = [int(token) for token in np.array(step(tokens).argmax(-1))]
            found.append(tokens)
            advance(1)
    return [list(row) for row in zip(*found, strict=True)] if found else [[] for _ in caches]

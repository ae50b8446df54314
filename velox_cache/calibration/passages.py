"""Parts of a text on which losses are measured: a context, and two things that may come after it."""

from collections.abc import Sequence
from dataclasses import dataclass

N_CONTEXT = 1024
LEAST_CONTEXT = 256  # of which the smallest share is a few rows
N_LATER = 128
MOST_PASSAGES = 3
_WORK = 2  # tokens of a prefill that one of a context takes, the errors of all methods and shares included


@dataclass(frozen=True)
class Passage:
    """Tokens of a context, and what is read after it: once the one, once the other."""

    context: Sequence[int]
    next: Sequence[int]  # N_LATER that come next in the text
    copied: Sequence[int]  # N_LATER of the context once more, from far back


def passages(tokens: Sequence[int]) -> list[Passage]:
    """Up to MOST_PASSAGES of a text, as many as it has contexts, spread evenly over it; none of too short a text."""
    n_context = context_length(tokens)
    if n_context < LEAST_CONTEXT:
        return []
    n = max(1, min(MOST_PASSAGES, len(tokens) // N_CONTEXT))
    found = []
    for number in range(n):
        start = (len(tokens) - n_context - N_LATER) * number // max(n - 1, 1)
        context, after = tokens[start:][:n_context], tokens[start + n_context :][:N_LATER]
        place = (n_context - N_LATER) * (number + 1) // (n + 2)  # another in each
        found.append(Passage(context, after, context[place:][:N_LATER]))
    return found


def work_of_losses(n_tokens: int) -> int:
    """What it takes to measure losses on a text of so many tokens, in tokens of a prefill."""
    return _WORK * sum(len(part.context) for part in passages(range(n_tokens)))


def context_length(tokens: Sequence[int]) -> int:
    """Tokens of each context of a text."""
    return min(N_CONTEXT, len(tokens) - N_LATER)

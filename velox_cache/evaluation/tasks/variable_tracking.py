"""Variable tracking: which variables hold a value, through a chain of assignments in much text."""

import itertools
import random

from velox_cache.evaluation.tasks.task import TaskPrompt, inserted

N_LINKS = 4  # variables of a chain
N_CHAINS = 2


def variable_tracking(rng: random.Random, filler: str) -> TaskPrompt:
    """Two chains of four variables in the text; all names of one are asked for, by the number that starts it."""
    names = rng.sample([a + b + c for a in "BCDFG" for b in "AEIOU" for c in "KLMNP"], N_LINKS * N_CHAINS)
    numbers = rng.sample(range(10000, 99999), N_CHAINS)
    chains = [names[i * N_LINKS : (i + 1) * N_LINKS] for i in range(N_CHAINS)]
    lines, depths = [], []
    for number, chain in zip(numbers, chains, strict=True):
        lines.append(f"VAR {chain[0]} = {number}")
        lines += [f"VAR {new} = {old}" for old, new in itertools.pairwise(chain)]
        depths += sorted(rng.random() for _ in chain)
    return TaskPrompt(
        text=f"{inserted(filler, lines, depths)}\n\n"
        f"Name the {N_LINKS} variables that hold {numbers[0]}, directly or through other variables.",
        reply_start=f"The variables that hold {numbers[0]} are:",
        answers=tuple(chains[0]),
        evidence=tuple(lines[:N_LINKS]),
        floor=1 / N_CHAINS,
    )

"""Counting: which words of a long list come most often. The whole list matters, no place in it does."""

import random

from velox_cache.evaluation.tasks.task import TaskPrompt
from velox_cache.evaluation.tasks.words import NOUNS

N_ASKED = 3


def common_words(rng: random.Random, filler: str) -> TaskPrompt:
    """Three words come ten times as often as the others. The list has as many words as the filler."""
    total = max(40, len(filler.split()))
    chosen = rng.sample(NOUNS, len(NOUNS))
    common, rare = chosen[:N_ASKED], chosen[N_ASKED:]
    share = total / (10 * N_ASKED + len(rare))
    counts = {word: max(2, round(10 * share)) for word in common} | {word: max(1, round(share)) for word in rare}
    return _asked(rng, counts, common, "three most common words", len(chosen))


def frequent_words(rng: random.Random, filler: str) -> TaskPrompt:
    """Made-up words with frequencies that fall as 1 / rank^2; the three most frequent are asked for."""
    total = max(40, len(filler.split())) // 2  # a made-up word is about two tokens
    words = rng.sample([a + b + c + d for a in "bdfgk" for b in "aeiou" for c in "lmnrs" for d in "aeiou"], 20)
    weights = [1 / rank**2 for rank in range(1, len(words) + 1)]
    counts = {word: max(1, round(total * w / sum(weights))) for word, w in zip(words, weights, strict=True)}
    return _asked(rng, counts, words[:N_ASKED], "three most frequent coded words", len(words))


def _asked(rng: random.Random, counts: dict[str, int], answers: list[str], what: str, n_words: int) -> TaskPrompt:
    listed = [word for word, count in counts.items() for _ in range(count)]
    rng.shuffle(listed)
    return TaskPrompt(
        text=f"Read this list of words.\n\n{' '.join(listed)}\n\nWhat are the {what} in the list?",
        reply_start=f"The {what} in the list are:",
        answers=tuple(answers),
        evidence=(" ".join(listed),),
        floor=N_ASKED / n_words,
    )

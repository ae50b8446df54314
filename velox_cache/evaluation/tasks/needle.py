"""Needle in a haystack: one sentence among much text, and a question that only it answers."""

import random

from velox_cache.evaluation.tasks.task import TaskPrompt, inserted
from velox_cache.evaluation.tasks.words import NOUNS, PLACES

N_KEYS = 4


def needle(rng: random.Random, filler: str) -> TaskPrompt:
    """One needle at a random depth, asked for in its own words."""
    place, word = rng.choice(PLACES), rng.choice(NOUNS)
    fact = f"The secret code word of the {place} is {word}."
    return TaskPrompt(
        text=f"{inserted(filler, [fact], [rng.random()])}\n\nWhat is the secret code word of the {place}?",
        reply_start=f"The secret code word of the {place} is",
        answers=(word,),
        evidence=(fact,),
        floor=0.0,
    )


def paraphrased_needle(rng: random.Random, filler: str) -> TaskPrompt:
    """One needle at a random depth, asked for in other words."""
    place, word = rng.choice(PLACES), rng.choice(NOUNS)
    fact = f"The secret code word of the {place} is {word}."
    question, start = rng.choice(
        [
            (f"Which word opens the {place}'s hidden door?", f"To enter the {place}, say"),
            (f"The guard of the {place} wants to hear the password. What do you say?", "The password is"),
        ]
    )
    return TaskPrompt(
        text=f"{inserted(filler, [fact], [rng.random()])}\n\n{question}",
        reply_start=start,
        answers=(word,),
        evidence=(fact,),
        floor=0.0,
    )


def multi_key_needle(rng: random.Random, filler: str) -> TaskPrompt:
    """Four needles of one form at random depths, one of which is asked for; the others distract."""
    places, words = rng.sample(PLACES, N_KEYS), rng.sample(NOUNS, N_KEYS)
    facts = [f"The secret code word of the {place} is {word}." for place, word in zip(places, words, strict=True)]
    asked = rng.randrange(N_KEYS)
    return TaskPrompt(
        text=f"{inserted(filler, facts, [rng.random() for _ in facts])}\n\n"
        f"What is the secret code word of the {places[asked]}?",
        reply_start=f"The secret code word of the {places[asked]} is",
        answers=(words[asked],),
        evidence=(facts[asked],),
        floor=1 / N_KEYS,
    )

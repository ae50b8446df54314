"""Two-hop questions: the answer to the first part is needed to find the second."""

import random

from velox_cache.evaluation.tasks.task import TaskPrompt, inserted
from velox_cache.evaluation.tasks.words import CITIES, NOUNS, PEOPLE

N_PEOPLE = 3


def two_hop(rng: random.Random, filler: str) -> TaskPrompt:
    """Who lives where and what is famous where, scattered over the text; from a person to a thing by way of a city."""
    people, cities, things = rng.sample(PEOPLE, N_PEOPLE), rng.sample(CITIES, N_PEOPLE), rng.sample(NOUNS, N_PEOPLE)
    lives = [f"{person} lives in {city}." for person, city in zip(people, cities, strict=True)]
    famous = [f"The symbol of {city} is the {thing}." for city, thing in zip(cities, things, strict=True)]
    asked = rng.randrange(N_PEOPLE)
    facts = [*lives, *famous]
    return TaskPrompt(
        text=f"{inserted(filler, facts, [rng.random() for _ in facts])}\n\n"
        f"What is the symbol of the city where {people[asked]} lives?",
        reply_start=f"The symbol of the city where {people[asked]} lives is the",
        answers=(things[asked],),
        evidence=(lives[asked], famous[asked]),
        floor=1 / N_PEOPLE,
    )

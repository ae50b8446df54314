"""Questions about a long text: what is planted in it, what is asked later, the right answer and wrong ones of its form.

The constructions follow needle tests and RULER (arXiv:2404.06654), anew and for small models, which need not speak: a
right answer that is likelier than every wrong one counts, so the wrong ones are as long and look alike.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from velox_cache.evaluation.words import CITIES, NOUNS, PEOPLE, PLACES

N_WRONG = 3
"""Wrong answers of a question."""
CHANCE = 1 / (1 + N_WRONG)
"""Share of questions that a reader who guesses answers."""


@dataclass(frozen=True)
class Question:
    """One question, in words."""

    task: str
    facts: tuple[str, ...]  # planted in the text, in this order
    asked: str  # follows the text; the answer goes on from there
    right: str  # begins with a space, as a word that follows does
    wrong: tuple[str, ...]  # candidates, best first; those of the right one's length in tokens are used
    quoted: str = ""  # a passage of the text that must stay whole


Task = Callable[[random.Random, str], Question]
"""(seeded generator, the natural text) -> question; every random choice comes from the generator"""


def question_about(task: str, rng: random.Random, text: str) -> Question:
    """A question of this task about `text`. Raises ValueError for an unknown task."""
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[task](rng, text)


def planted(rng: random.Random, text: str, facts: tuple[str, ...], whole: str = "") -> str:
    """`text` with each fact on a line of its own, after a line or sentence; in their order, in its first nine tenths.

    whole: a passage that no fact may break.
    """
    start = text.find(whole) if whole else len(text)
    ends = [found.end() for found in re.finditer(r"\n|[.!?;] ", text)] or [len(text)]
    outside = [end for end in ends if not start < end < start + len(whole)]
    usable = [end for end in outside if end <= 0.9 * len(text)] or outside[:1]
    places = sorted(rng.choice(usable) for _ in facts)
    parts, before = [], 0
    for place, fact in zip(places, facts, strict=True):
        parts += [text[before:place].rstrip(), f"\n{fact}\n"]
        before = place
    return "".join([*parts, text[before:]])


def _asked(question: str, start: str) -> str:
    return f"\n\nQuestion: {question}\nAnswer: {start}"


def _others(rng: random.Random, words: tuple[str, ...], *but: str) -> tuple[str, ...]:
    return tuple(f" {word}" for word in rng.sample(words, len(words)) if word not in but)


def _numbers(rng: random.Random, count: int, digits: int = 4) -> list[str]:
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def _needle(rng: random.Random, text: str) -> Question:
    """One sentence, asked for in its own words."""
    place, word = rng.choice(PLACES), rng.choice(NOUNS)
    said = f"The secret code word of the {place} is"
    asked = _asked(f"What is the secret code word of the {place}?", said)
    return Question("needle", (f"{said} {word}.",), asked, f" {word}", _others(rng, NOUNS, word))


def _paraphrased(rng: random.Random, text: str) -> Question:
    """One sentence, asked for in other words."""
    person, word = rng.choice(PEOPLE), rng.choice(NOUNS)
    fact = f"{person} keeps the old {word} down in the cellar."
    asked = _asked(f"What has {person} stored below the house?", f"Below the house, {person} has stored the")
    return Question("paraphrased", (fact,), asked, f" {word}", _others(rng, NOUNS, word))


def _distractors(rng: random.Random, text: str) -> Question:
    """Four sentences of one form, one of which is asked for; the wrong answers are the others'."""
    places, words = rng.sample(PLACES, 1 + N_WRONG), rng.sample(NOUNS, 1 + N_WRONG)
    forms = [f"The team of the {place} carries a flag with a picture of the" for place in places]
    facts = tuple(f"{form} {word}." for form, word in zip(forms, words, strict=True))
    asked = _asked(f"Whose picture is on the flag of the team of the {places[0]}?", forms[0])
    wrong = tuple(f" {word}" for word in words[1:])
    order = rng.sample(range(len(facts)), len(facts))
    return Question(
        "distractors", tuple(facts[i] for i in order), asked, f" {words[0]}", (*wrong, *_others(rng, NOUNS, *words))
    )


def _several(rng: random.Random, text: str) -> Question:
    """Three sentences far apart, all asked for at once; the wrong answers mix them up."""
    one, two, three = words = rng.sample(NOUNS, 3)
    facts = tuple(
        f"The {rank} prize of the raffle is a {word}."
        for rank, word in zip(("first", "second", "third"), words, strict=True)
    )
    asked = _asked("What are the first, the second and the third prize of the raffle?", "In this order, they are:")
    mixed = ((two, three, one), (three, one, two), (one, three, two), (two, one, three), (three, two, one))
    return Question(
        "several", facts, asked, f" {one}, {two}, {three}", tuple(f" {', '.join(order)}" for order in mixed)
    )


def _key_value(rng: random.Random, text: str) -> Question:
    """A JSON object of up to 50 pairs, as many as an eighth of the text's length allows; the value of one key."""
    count = max(1 + N_WRONG, min(50, len(text) // 8 // 24))
    keys = rng.sample([f"{place}-{noun}" for place in PLACES for noun in NOUNS], count)
    values = _numbers(rng, count)
    which = rng.randrange(count)
    asked = f'\n\nIn the JSON object above, the value of "{keys[which]}" is'
    wrong = tuple(f" {value}" for value in rng.sample(values, count) if value != values[which])
    fact = json.dumps(dict(zip(keys, map(int, values), strict=True)))
    return Question("key_value", (fact,), asked, f" {values[which]}", wrong)


def _changed(rng: random.Random, text: str) -> Question:
    """A fact stated twice with a change between; the later one counts, the earlier is a wrong answer."""
    person = rng.choice(PEOPLE)
    old, new, *others = rng.sample(CITIES, 2 + 8)
    facts = (f"{person} lives in the city of {old}.", f"{person} has moved away and now lives in the city of {new}.")
    asked = _asked(f"Where does {person} live now?", f"{person} now lives in the city of")
    return Question("changed", facts, asked, f" {new}", (f" {old}", *(f" {city}" for city in others)))


def _identifiers(rng: random.Random, text: str) -> Question:
    """Constants defined far above, among others; the value of one."""
    names = [f"MAX_{noun.upper()}_SIZE" for noun in rng.sample(NOUNS, 1 + N_WRONG)]
    values = _numbers(rng, 1 + N_WRONG)
    lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    asked = f"\n\n# As defined above\nassert {names[0]} =="
    wrong = tuple(f" {value}" for value in values[1:])
    return Question("identifiers", tuple(rng.sample(lines, len(lines))), asked, f" {values[0]}", wrong)


def _copying(rng: random.Random, text: str) -> Question:
    """A passage of the text's first half: it is given its beginning and goes on; wrong ones are from elsewhere."""
    words = [(found.start(), found.end()) for found in re.finditer(r"\S+", text)]
    n_given, n_asked = 12, 5
    last = len(words) - n_given - n_asked
    at = rng.randrange(last // 20, max(last // 20 + 1, last // 2))
    given = text[words[at][0] : words[at + n_given - 1][1]]

    def stretch(first: int) -> str:
        return " " + " ".join(text[start:end] for start, end in words[first : first + n_asked])

    right = stretch(at + n_given)
    wrong = dict.fromkeys(stretch(rng.randrange(last)) for _ in range(300))
    asked = f"\n\nOnce more, a passage from above: {' '.join(given.split())}"
    quoted = text[words[at][0] : words[at + n_given + n_asked - 1][1]]
    return Question("copying", (), asked, right, tuple(one for one in wrong if one != right), quoted)


def _two_hop(rng: random.Random, text: str) -> Question:
    """From a person to a city to a thing, each step in a sentence of its own; the wrong answers are other cities'."""
    people, cities, things = rng.sample(PEOPLE, 3), rng.sample(CITIES, 3), rng.sample(NOUNS, 3)
    home = [f"{person} was born in {city}." for person, city in zip(people, cities, strict=True)]
    symbol = [f"The symbol of {city} is a {thing}." for city, thing in zip(cities, things, strict=True)]
    asked = _asked(f"What is the symbol of the city where {people[0]} was born?", "Its symbol is a")
    wrong = tuple(f" {thing}" for thing in things[1:])
    facts = rng.sample([*home, *symbol], 6)
    return Question("two_hop", tuple(facts), asked, f" {things[0]}", (*wrong, *_others(rng, NOUNS, *things)))


def _variables(rng: random.Random, text: str) -> Question:
    """Two chains of three assignments; the number at the root of one, the other's among the wrong answers."""
    names = rng.sample([a + b + c for a in "BCDFG" for b in "AEIOU" for c in "KLMNP"], 6)
    numbers = _numbers(rng, 1 + N_WRONG)
    first = [f"VAR {names[0]} = {numbers[0]}", f"VAR {names[1]} = {names[0]}", f"VAR {names[2]} = {names[1]}"]
    other = [f"VAR {names[3]} = {numbers[1]}", f"VAR {names[4]} = {names[3]}", f"VAR {names[5]} = {names[4]}"]
    facts = tuple(line for pair in zip(first, other, strict=True) for line in rng.sample(pair, 2))
    asked = f"\n\nFollowing the assignments, the number in the variable {names[2]} is"
    return Question("variables", facts, asked, f" {numbers[0]}", tuple(f" {number}" for number in numbers[1:]))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "needle": _needle,
        "paraphrased": _paraphrased,
        "distractors": _distractors,
        "several": _several,
        "key_value": _key_value,
        "changed": _changed,
        "identifiers": _identifiers,
        "copying": _copying,
        "two_hop": _two_hop,
        "variables": _variables,
    }
)
"""The tasks by name."""

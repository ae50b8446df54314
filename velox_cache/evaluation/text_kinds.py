"""Four kinds of text on every machine, each in two halves: one that choices may look at, one for the final table."""

import importlib.util
import lzma
import random
import zlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType

from velox_cache.calibration.texts import CALIBRATION
from velox_cache.file_checks import file_text

HALVES = ("choice", "report")

_MODULES = """
argparse asyncio.base_events calendar cgitb configparser difflib dis doctest enum ftplib functools gettext heapq
html.parser http.client imaplib inspect ipaddress logging mailbox optparse pathlib pdb pickle pickletools platform
plistlib pprint pydoc random sched selectors shutil smtplib ssl statistics subprocess tarfile tempfile textwrap
threading trace traceback turtle typing unittest.mock uuid warnings weakref xml.dom.minidom zipfile
"""


def kind_text(kind: str, half: str) -> str:
    """The text of a kind in a half, or that half of the UTF-8 file at this path. The halves share no passage.

    Raises ValueError for an unknown kind or half, or a file that cannot be read.
    """
    if kind not in KINDS and half in HALVES and Path(kind).exists():
        text = file_text(kind)
        middle = len(text) // 2
        return text[:middle] if half == HALVES[0] else text[middle:]
    if kind not in KINDS or half not in HALVES:
        raise ValueError(
            f"there is no text {kind!r} in a half {half!r}: give a file, or one of {', '.join(KINDS)}; the halves are "
            f"{' and '.join(HALVES)}"
        )
    return KINDS[kind](HALVES.index(half))


def _prose(half: int) -> str:
    """Seven narrative books of the King James Bible (1611), public domain, as Debian's bible-kjv-text has them."""
    packed = files("velox_cache.evaluation").joinpath("data", "prose.txt.xz").read_bytes()
    return "\n\n".join(lzma.decompress(packed).decode().split("\n\n")[half::2])  # every other chapter


def _technical(half: int) -> str:
    """The Python language reference as `pydoc` shows it, without what calibration reads.

    Its topics repeat each other: a paragraph counts where it stands first.
    """
    seen = {paragraph for name in CALIBRATION for paragraph in topics[name].split("\n\n")}
    halves: tuple[list[str], list[str]] = ([], [])
    for name, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            if paragraph not in seen:
                seen.add(paragraph)
                halves[_side(name)].append(paragraph)
    return "\n\n".join(halves[half])


def _code(half: int) -> str:
    """Modules of the standard library, in Python."""
    found = []
    for name in (name for name in _MODULES.split() if _side(name) == half):
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:  # not in this version of Python
            continue
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            found.append(Path(spec.origin).read_text())
    return "\n\n".join(found)


_ASKS = (
    "Could you tell me how the {thing} is coming along?",
    "I was wondering whether you have had time for the {thing}.",
    "What do you think about the {thing} that we saw in {city}?",
    "Did anybody from {city} call about the {thing} today?",
    "How much did they want for the {thing}, in the end?",
    "Do you remember who was supposed to bring the {thing} on {day}?",
    "Is it true that the {thing} has to be in {city} by {day}?",
    "Why would they send a {adjective} {thing} all the way to {city}?",
)
_ANSWERS = (
    "Well, it is {adjective}, but I would not count on it before {day}.",
    "Not really. They told me on {day} that it cost {number} crowns, which seems {adjective} to me.",
    "I asked {name} about that, and the answer was rather {adjective}.",
    "It took me {number} minutes to find out, and then the office in {city} was closed.",
    "{name} said that we need {number} of them, but I have only seen a {adjective} one so far.",
    "Honestly, I have no idea. Perhaps {name} knows more; shall I ring on {day}?",
    "Yes, and it was more {adjective} than anything that I have seen since {city}.",
    "You would have to ask in {city}. The last time, {name} paid {number} crowns for the transport alone.",
)
_REMARKS = (
    "That is good to know.",
    "Oh, I see. Then let us wait until {day}.",
    "Hm, {name} told me something else, but never mind.",
    "All right, I will write that down.",
    "That sounds {adjective}. Anyway,",
    "Thank you, that helps.",
    "I am not so sure, but go on.",
    "Fair enough.",
)
_FILL = MappingProxyType(
    {
        "thing": "piano bicycle contract painting heating garden letter ladder engine carpet menu lamp roof boat "
        "typewriter fountain wallpaper greenhouse",
        "city": "Bergen Lyon Turin Graz Cork Malmo Leeds Ghent Porto Basel Krakow Tampere",
        "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "adjective": "expensive strange cheerful heavy useful late quiet difficult beautiful small confusing green "
        "rusty reliable",
        "name": "Anna Boris Carla Dmitri Elsa Frank Greta Henry Ingrid Jonas Karl Lena Martin Nadia",
    }
)


def _dialogue(half: int) -> str:
    """Conversations of two people, from templates."""
    rng = random.Random(f"dialogue {HALVES[half]}")
    words = {name: listed.split() for name, listed in _FILL.items()}
    turns = []
    for scene in range(300):
        first, second = rng.sample(words["name"], 2)
        turns.append(f"\nScene {scene + 1}. {first} and {second}, in {rng.choice(words['city'])}.\n")
        for _ in range(rng.randrange(6, 14)):
            for speaker, forms in ((first, _ASKS), (second, _ANSWERS), (first, _REMARKS)):
                filled = {name: rng.choice(listed) for name, listed in words.items()} | {"number": rng.randrange(2, 99)}
                turns.append(f"{speaker}: {rng.choice(forms).format(**filled)}")
    return "\n".join(turns)


def _side(name: str) -> int:
    """The half of a part, by its name alone: other versions of Python have more parts, and none changes sides."""
    return (zlib.crc32(name.encode()) >> 4) % len(HALVES)  # this bit makes both halves of a kind about as long


KINDS: Mapping[str, Callable[[int], str]] = MappingProxyType(
    {"prose": _prose, "technical": _technical, "code": _code, "dialogue": _dialogue}
)
"""The kinds of text, by name: half 0 or 1 -> text."""

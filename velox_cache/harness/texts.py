"""Texts of different kinds to read, there wherever mlx_lm is. Neither calibration nor the tasks' filler use them."""

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from importlib.metadata import files
from pathlib import Path
from types import MappingProxyType

from velox_cache.calibration.texts import held_out_text
from velox_cache.file_checks import file_text


def licence_text() -> str:
    """The Apache License as transformers, which mlx_lm needs, brings it along; about 2,300 tokens.

    Raises ValueError when it is not there.
    """
    for file in files("transformers") or ():
        if file.name == "LICENSE":
            return file.read_text()
    raise ValueError("transformers is installed here without its LICENSE file; choose other texts")


def code_text() -> str:
    """Python source of the standard library's `textwrap`; about 5,000 tokens."""
    return inspect.getsource(textwrap)


TEXTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"documentation": held_out_text, "licence": licence_text, "code": code_text}
)
"""Prose on a technical matter, legal prose, source code."""


def text_named(name: str) -> str:
    """The text of this name, or the contents of the UTF-8 file at this path.

    Raises ValueError for a name that is neither, or a file that cannot be read.
    """
    if name in TEXTS:
        return TEXTS[name]()
    if not Path(name).exists():
        raise ValueError(f"there is no text {name!r}: give a file, or one of {', '.join(TEXTS)}")
    return file_text(name)


def text_digest(text: str) -> str:
    """A fingerprint, to tell whether two runs read the same text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def passages(tokens: list[int], length: int, count: int) -> list[list[int]]:
    """`count` stretches of `length` tokens, spread evenly from the first to the last; they overlap in a short text.

    Raises ValueError when the text is shorter than one of them.
    """
    spare = len(tokens) - length
    if spare < 0 or (spare < count - 1):
        raise ValueError(f"the text holds {len(tokens)} tokens; {count} passages of {length} do not fit")
    starts = [spare * i // max(1, count - 1) for i in range(count)]
    return [tokens[start : start + length] for start in starts]

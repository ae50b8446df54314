"""English text that comes with every Python: the language reference that `pydoc` shows, in parts that do not overlap.

The wording changes a little from one version of Python to the next, and with it what is measured on it.
"""

from pydoc_data.topics import topics

SOURCE = "the Python reference in pydoc_data.topics"
CALIBRATION = ("calls", "assignment", "try", "class", "numbers", "strings", "with", "attribute-access")
_HELD_OUT = ("execmodel", "import")
_FILLER = ("debugger", "slicings", "formatstrings")


def calibration_texts() -> list[str]:
    """Texts to calibrate on, about 13,000 tokens."""
    return [topics[name] for name in CALIBRATION]


def held_out_text() -> str:
    """Text to evaluate on, about 4,300 tokens."""
    return "\n".join(topics[name] for name in _HELD_OUT)


def filler_text() -> str:
    """Text to hide a fact in, about 12,000 tokens."""
    return "\n".join(topics[name] for name in _FILLER)

"""The settings that say how rows are stored."""

from collections.abc import Mapping
from typing import Any

from velox_fn.engine import checks
from velox_fn.engine.codebooks import BITS


def both_widths(bits: int | None, settings: Mapping[str, Any]) -> dict[str, int]:
    """The settings that `bits` stands for. ValueError when one of them is given as well."""
    if bits is None:
        return {}
    given = [name for name in ("key_bits", "value_bits") if settings.get(name) is not None]
    if given:
        raise ValueError(
            f"bits={bits} is key_bits and value_bits in one, and {' and '.join(given)} is given too; drop one"
        )
    return {"key_bits": bits, "value_bits": bits}


def check_one_storage(settings: Mapping[str, Any]) -> None:
    """ValueError unless codebooks have bits that there are, and rows are stored by them alone and as they come."""
    books = settings["codebooks"]
    checks.one_of("codebooks", checks.plain(books), BITS)
    also = [name for name in ("key_bits", "value_bits") if settings.get(name) is not None]
    if also:
        raise ValueError(f"codebooks={books} stores keys and values, and {' and '.join(also)} too; give one of both")
    if settings.get("renumber"):
        raise ValueError(
            f"renumber=True turns the stored keys anew for every view, which codebooks={books} does not allow without "
            "reading them back as a whole; leave one of both out"
        )
    if settings.get("merge"):
        raise ValueError(
            f"merge={settings['merge']} adds to stored values, and the codes of a row do not change after it came; "
            f"leave codebooks={books} out, or merge"
        )

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
    """ValueError unless codebooks have bits that there are, and rows are stored by them alone."""
    books = settings["codebooks"]
    checks.one_of("codebooks", checks.plain(books), BITS)
    also = [name for name in ("key_bits", "value_bits") if settings.get(name) is not None]
    if also:
        raise ValueError(f"codebooks={books} stores keys and values, and {' and '.join(also)} too; give one of both")

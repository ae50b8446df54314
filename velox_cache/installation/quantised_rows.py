"""What `install` asks of a model whose caches store quantised rows."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.installation.installed import InstalledCaches
from velox_cache.introspection.probing import left_as_it_was
from velox_cache.introspection.query_tap import QueryTap, model_type
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


def tap_of(model: nn.Module, *, why_quantised: bool) -> QueryTap:
    """A tap on the model's attention, which reads quantised rows or shows queries. ValueError where there is none."""
    try:
        return QueryTap(model)
    except ValueError as error:
        if not why_quantised:
            raise
        raise ValueError(
            f"model type {model_type(model)!r} does attention by hand, not through mlx_lm's function, and cannot read "
            "quantised rows; leave bits, key_bits, value_bits and codebooks out"
        ) from error


def check_reads_quantised_rows(model: nn.Module, installed: InstalledCaches) -> None:
    """ValueError, with the tap removed, unless the model's calls of two tokens and of one take quantised rows.

    Nothing of the second call is computed. A model that fails with its own caches too fails as it does then.
    """
    try:
        _called_twice(model, installed())
    except BaseException as error:
        if installed.tap is not None:
            installed.tap.remove()
        if isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        mx.eval(_called_twice(model, make_prompt_cache(model)))
        raise ValueError(
            f"model type {model_type(model)!r} does something with the keys and values that its caches return, beside "
            f"attention, that quantised rows do not allow ({error}); leave bits, key_bits, value_bits and codebooks out"
        ) from error


def _called_twice(model: nn.Module, caches: list[Any]) -> list[Any]:
    with left_as_it_was(model):
        return [model(mx.array([tokens]), cache=caches) for tokens in ([0, 1], [0])]

"""What `install` asks of a model whose attention must read rows in a form that mlx_lm's caches do not have."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.caches.bounded import BoundedKVCache
from velox_cache.installation.installed import InstalledCaches
from velox_cache.introspection.probing import left_as_it_was
from velox_cache.introspection.query_tap import QueryTap, flat_caches, model_type


@dataclass(frozen=True)
class RowForm:
    """A form of rows, in words, and what to do where a model cannot read it."""

    rows: str
    remedy: str


QUANTISED = RowForm("quantised rows", "leave bits, key_bits, value_bits and codebooks out")
IN_TIERS = RowForm(
    "rows of which each head has a number of its own",
    'give each layer one budget, or say shares="calibrated-layers" (--layer-shares calibrated-layers)',
)


def tap_of(model: nn.Module, form: RowForm | None) -> QueryTap:
    """A tap on the model's attention: it reads rows of this form, or shows queries. ValueError where there is none."""
    try:
        return QueryTap(model)
    except ValueError as error:
        if form is None:
            raise
        raise ValueError(
            f"model type {model_type(model)!r} does attention by hand, not through mlx_lm's function, and cannot read "
            f"{form.rows}; {form.remedy}"
        ) from error


def check_reads(model: nn.Module, installed: InstalledCaches, form: RowForm) -> None:
    """ValueError, with the tap removed, unless the model's calls of two tokens and of one take rows of this form.

    Nothing is computed: of a model that is spread over ranks only some may ask. A model that fails with its own caches
    too fails as it does then.
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
            f"attention, that {form.rows} do not allow ({error}); {form.remedy}"
        ) from error


def _called_twice(model: nn.Module, caches: list[object]) -> list[object]:
    outputs = []
    with left_as_it_was(model):
        for tokens in ([0, 1], [0]):
            outputs.append(model(mx.array([tokens]), cache=caches))
            for cache in flat_caches(caches):
                if isinstance(cache, BoundedKVCache):
                    _ = cache.state  # lets go of the last view, which the next call would begin to compute
    return outputs

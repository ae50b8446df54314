"""What `install` asks of a model whose attention must read rows in a form that mlx_lm's caches do not have."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.caches.bounded import BoundedKVCache
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.installation.installed import InstalledCaches
from velox_cache.installation.tiers import Tier
from velox_cache.introspection.key_layouts import KeyLayouts
from velox_cache.introspection.plan import LayerPlan
from velox_cache.introspection.probing import left_as_it_was
from velox_cache.introspection.query_tap import QueryTap, flat_caches, model_type
from velox_fn import l2norm


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


def reads_tiers(model: nn.Module, plan: Sequence[LayerPlan]) -> bool:
    """Whether some layers have several heads, and the model's attention reads them when these have numbers of rows of
    their own: it is called as `check_reads` calls it, with two tiers in each such layer."""
    layouts = KeyLayouts(model)
    heads = {entry.layer: layouts.of_layer(entry.layer) for entry in plan if entry.bounded}
    several = {layer: layout.n_kv_heads for layer, layout in heads.items() if layout is not None}
    some = l2norm(budget=8)
    methods = {
        layer: (Tier((0,), some), Tier(tuple(range(1, n)), some)) if n > 1 else (Tier(None, some),)
        for layer, n in several.items()
    }
    if methods.keys() != heads.keys() or max(several.values(), default=1) == 1:
        return False
    try:
        tap = tap_of(model, IN_TIERS).install()
        probe = InstalledCaches(weakref.ref(model), tuple(plan), methods, EvictingKVCache, False, tap, 0, None)
        check_reads(model, probe, IN_TIERS)
    except ValueError:
        return False
    tap.remove()
    return True


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

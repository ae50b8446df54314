"""Scores that weigh a row's value, on models that cache none (latent attention): refused, or left out of a default."""

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from velox_cache.introspection.latents import caches_latents
from velox_fn.engine.scorers import SCORERS
from velox_fn.method import Method
from velox_fn.methods.fusion import term_names

_CACHES_NONE = (
    "this model caches none: its rows are latents (MLA), of which keys and values of all heads are made, each with a "
    "rotary part"
)


def default_terms(method: Method, settings: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """The setting `terms` that a fusion has on this model where nobody gave it and it is not the method's own.

    The terms that weigh values are left out where no values are cached. Empty where nothing is, or no term would be
    left.
    """
    if not method.fuses or "terms" in settings:
        return {}
    names = term_names(method.defaults["terms"])
    left = [name for name in names if not _weighs_values(name)]
    return {"terms": "+".join(left)} if left and len(left) < len(names) and caches_latents(model) else {}


def why_left_out(method: Method, terms: str) -> str:
    """In words: which of the method's own terms are not among `terms`, the ones of `default_terms`, and why."""
    gone = [name for name in term_names(method.defaults["terms"]) if name not in term_names(terms)]
    return f"the term {' and '.join(gone)} is left out: it scores a row by its value, and {_CACHES_NONE}"


def check_values_read(method: Method, settings: Mapping[str, Any], model: nn.Module) -> None:
    """ValueError when the method scores a row by its value, or merges values, and the model's rows have none."""
    terms = term_names({**method.defaults, **settings}["terms"]) if method.fuses else ()
    by_value = [name for name in terms if _weighs_values(name)]
    merges = settings.get("merge", 0)
    if not (method.reads_values or by_value or merges) or not caches_latents(model):
        return
    if merges:
        raise ValueError(
            f"{method.label} with merge={merges} adds the value of a row that leaves to others, and {_CACHES_NONE}; "
            "leave merge out"
        )
    others = "+".join(name for name in terms if name not in by_value)
    what = f"{method.label} with the term {' and '.join(by_value)}" if by_value else method.label
    remedy = (
        f"give terms={others!r}"
        if others
        else "take a method that scores by keys or attention, such as qfilters or h2o"
    )
    raise ValueError(f"{what} scores a row by its value, and {_CACHES_NONE}; {remedy}")


def _weighs_values(term: str) -> bool:
    return "values" in SCORERS[term].reads

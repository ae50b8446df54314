"""The default of `recent`, for whoever installs a method: `install`, the command line, comparisons, benchmarks.

A factory of velox_fn keeps no recent rows unless told to, as in the papers, and so do the documents' configs.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from velox_cache.calibration.artifact import Calibration
from velox_fn.engine import checks
from velox_fn.engine.pinned import pinned_ranges
from velox_fn.method import Method
from velox_fn.methods.fusion import term_names

RECENT_SHARE = 0.75
"""Of the budget, where nothing else is known: of the shares tried, it follows the full cache best."""


def recent_share(method: Method, settings: Mapping[str, Any], calibration: Calibration | None) -> float:
    """The share of the budget that is recent by default: the method's own, one that was searched, or `RECENT_SHARE`."""
    if method.recent_share is not None:
        return method.recent_share
    if calibration is None or calibration.fusion is None or not method.fuses:
        return RECENT_SHARE
    asked = {**method.defaults, **settings}
    is_searched = calibration.fusion.is_of(term_names(asked["terms"]), asked["combine"])
    return calibration.fusion.recent_share if is_searched else RECENT_SHARE


def with_default_recent(method: Method, settings: Mapping[str, Any], share: float | Fraction) -> Mapping[str, Any]:
    """`settings` with `recent` where the method has it and they do not: a share of the budget that is not
    pinned, all but the sinks.
    """
    if not method.recent or "recent" in settings:
        return settings
    asked = {"n_sink": 0, **method.defaults, **settings}
    try:
        budget = checks.rows_of_budget(asked["budget"])
        n_sink = checks.whole_number("n_sink", asked["n_sink"], 0)
        free = budget - sum(stop - start for start, stop in pinned_ranges(asked.get("pinned", ())))
    except ValueError:
        return settings  # the factory says what is wrong
    return {**settings, "recent": max(0, min(int(share * free), free - n_sink - 1))}

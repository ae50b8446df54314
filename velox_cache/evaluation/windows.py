"""Which latest rows every arm of a comparison protects, in words: a table says so where its arms differ."""

from collections.abc import Sequence
from fractions import Fraction

from velox_cache.evaluation.ceilings import CEILINGS
from velox_cache.evaluation.compare import Contender
from velox_cache.known_methods import method_named

_FINEST = 32  # parts of a budget: a window is a whole number of rows


def windows_note(contenders: Sequence[Contender]) -> str:
    """One sentence: the share of its budget that each arm protects, and which have no setting for it.

    Arms are named once, at the first of their budgets: at small ones a share is rounded to rows.
    """
    arms: dict[str, list[str]] = {}
    named: set[str] = set()
    for one in contenders:
        if one.arm.method is not None and one.arm.label not in named:
            named.add(one.arm.label)
            arms.setdefault(_window(one), []).append(one.arm.label)
    told = "; ".join(f"{share} in {', '.join(labels)}" for share, labels in arms.items())
    return f"Latest rows that always stay, of each budget: {told}."


def _window(one: Contender) -> str:
    name = "recent"
    if one.arm.method not in CEILINGS:
        method = method_named(str(one.arm.method))
        name = "recent" if method.recent else method.window or ""
    rows = {**one.settings, **one.arm.settings}.get(name)  # as asked for, where layers differ
    if rows is None:
        return "by its own rule"
    return str(Fraction(rows, one.arm.settings["budget"]).limit_denominator(_FINEST))

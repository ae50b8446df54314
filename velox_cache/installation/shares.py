"""`shares=` of `install`: one budget handed out to the layers by a rule that is named."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.layers_with_losses import why_no_losses
from velox_cache.calibration.texts import calibration_texts
from velox_cache.installation.budget_makers import (
    calibrated_budgets,
    calibrated_head_budgets,
    pyramid_budgets,
    squeeze_budgets,
)
from velox_cache.installation.tiers import Tier
from velox_cache.introspection.query_tap import model_type
from velox_cache.recommended import AUTO
from velox_fn.engine import checks
from velox_fn.engine.pinned import pinned_ranges
from velox_fn.method import Method

CALIBRATED = ("calibrated", "calibrated-layers")  # which take a calibration's losses
RULES = (*CALIBRATED, "pyramid", "squeeze")
_PYRAMID_WINDOW = 8  # rows of every layer, in the paper; more where the method itself protects more


def check_shares(shares: object, budget: object) -> None:
    """ValueError for a rule that is unknown, or a budget that it cannot hand out."""
    if shares is None or shares == AUTO:
        return
    if shares not in RULES:
        raise ValueError(
            f"shares={shares!r}: there is no such rule; a budget is shared out by {' or '.join(RULES)}, or alike (None)"
        )
    if budget is not None and not isinstance(checks.plain(budget), int):
        raise ValueError(
            f"shares={shares!r} hands one budget out to the layers, and budget={budget!r} is none; give a number, or "
            "leave shares out"
        )


def rule_by_itself(
    method: Method, settings: Mapping[str, Any], budget: object, calibration: Calibration | None
) -> str | None:
    """The rule for a budget that nobody asked to share out: that of heads where the calibration has losses of the
    method, and half of the budget, the least that a head can get, has room beside what is always kept."""
    if calibration is None or calibration.losses is None or method.label not in calibration.losses.methods:
        return None
    asked = {**method.settings, **method.own_names(settings)}
    rows = asked["budget"] if budget is None else checks.plain(budget)
    protected = asked["n_sink"] + sum(stop - start for start, stop in pinned_ranges(asked["pinned"]))
    return "calibrated" if isinstance(rows, int) and rows // 2 > protected else None


def check_has_losses(shares: str | None, model: nn.Module) -> None:
    """ValueError for a rule that takes losses, on a model of which a calibration cannot have any."""
    reason = why_no_losses(model) if shares in CALIBRATED else None
    if reason is not None:
        raise ValueError(
            f'shares="{shares}" takes what a calibration has measured that each head loses, and on model type '
            f'{model_type(model)!r} that cannot be measured: {reason}; take shares="pyramid" or "squeeze", or give '
            "budget= a list of your own"
        )


def shared_out(
    shares: str,
    model: nn.Module,
    method: Method,
    settings: Mapping[str, Any],
    budget: int,
    calibration: Calibration | None,
    tokenizer: Tokenizer | None,
) -> list[int] | list[int | list[int]]:
    """One budget per entry of the prompt cache, or for each of its KV heads, `budget` on average over what is bounded.

    Raises ValueError where the rule needs something that is not there, and as its function of `budget_makers` does.
    """
    if shares == "pyramid":
        asked = {**method.settings, **method.own_names(settings)}
        protected = sum(asked.get(name, 0) for name in ("n_sink", method.window) if name is not None)
        return pyramid_budgets(model, budget, window=max(_PYRAMID_WINDOW, protected + 1))
    if shares == "squeeze":
        if tokenizer is None:
            raise ValueError(
                'shares="squeeze" reads a text, to see how much each layer changes it: give tokenizer=tokenizer, as '
                "mlx_lm.load returns it with the model, or make the list from tokens of your own with squeeze_budgets"
            )
        return squeeze_budgets(model, list(tokenizer.encode(calibration_texts()[0])), budget)
    if calibration is None:
        raise ValueError(
            f'shares="{shares}" takes the losses of a calibration, and {method.label} uses none; take a method that '
            'does, such as fusion or learned, or shares="pyramid"'
        )
    made = calibrated_head_budgets if shares == "calibrated" else calibrated_budgets
    return made(calibration, budget, method=method.label)


def about_shares(shares: str, layers: Iterable[Sequence[Tier]]) -> str:
    """One line: the rule, and the budgets of the bounded layers, or of their heads."""
    of_heads = shares == "calibrated"
    budgets = [tier.method.settings["budget"] for tiers in layers for tier in tiers for _ in tier.heads or (0,)]
    average = sum(budgets) / len(budgets)
    return (
        f"{'heads' if of_heads else 'layers'} share the rows, {shares}: {min(budgets):,} to {max(budgets):,} each, "
        f"{average:,.0f} on average"
    )

"""The caches that are compared, as values: a method, its settings, and how to make fresh ones."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.fusion_weights import without_weights
from velox_cache.installation.installing import install, uninstall
from velox_cache.installation.layer_arguments import calibration_for
from velox_cache.known_methods import method_named

MakeCache = Callable[[], list[Any]]
"""Makes a fresh prompt cache."""


@dataclass(frozen=True)
class Arm:
    """One cache to compare; `method` None is the full cache."""

    label: str
    method: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = True  # a method that takes something of a calibration gets it
    searched: bool = True  # and with it the weights that a search has found

    @property
    def budget(self) -> int | None:
        """Most rows kept; None for the full cache, or where the method's default holds."""
        return self.settings.get("budget")


FULL = Arm("full cache")


def parse_arm(text: str, budget: int, recent: int | None = None) -> Arm:
    """The arm that `method:setting=value:...` names, at a budget; `calibrated=false` leaves the calibration out,
    and `searched=false` the weights that a search has added to it.

    recent: the latest rows that always stay, whatever the method calls them, so that arms are compared on the others;
    None leaves them to `install`. A method without such rows (TOVA) has none; `recent=` in the text comes first.

    Values are whole numbers, shares of the budget such as 1/4, true, false or words. Raises ValueError when the method
    is unknown or the text is not of that form.
    """
    method, *parts = text.split(":")
    known = method_named(method)
    settings: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise ValueError(f"an arm is method:setting=value:..., such as qfilters:recent=0, got {text!r}")
        settings[name] = _value(value, budget)
    settings = known.own_names(settings)
    window = "recent" if known.recent else known.window
    if window is not None and recent is not None:
        settings.setdefault(window, recent)
    calibrated, searched = (bool(settings.pop(name, True)) for name in ("calibrated", "searched"))
    return Arm(text, method, {"budget": budget, **settings}, calibrated, searched)


def cache_maker(model: nn.Module, arm: Arm, calibration: Calibration | None = None) -> MakeCache:
    """What makes fresh prompt caches of this arm for `model`, which itself is left with its own.

    Methods that score by attention wait for true queries: run the model inside `observe_queries(model)`. Raises
    ValueError as `velox_cache.install` does.
    """
    uninstall(model)
    if arm.method is None:
        return lambda: make_prompt_cache(model)
    if calibration is not None and not arm.searched:
        calibration = without_weights(calibration)
    needed = calibration_for(method_named(arm.method), calibration if arm.calibrated else None, arm.settings)
    install(model, arm.method, calibration=needed, calibrate=False, **arm.settings)
    make: MakeCache = model.make_cache
    uninstall(model)
    return make


def _value(text: str, budget: int) -> Any:
    words = {"true": True, "True": True, "false": False, "False": False, "None": None}
    share = re.fullmatch(r"(\d+)/([1-9]\d*)", text)
    if share:
        return budget * int(share[1]) // int(share[2])
    return words[text] if text in words else int(text) if re.fullmatch(r"-?\d+", text) else text

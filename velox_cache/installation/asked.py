"""Whether what `install` is asked for can be meant, looked at before anything else is."""

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from velox_cache.installation.storage_settings import check_one_storage
from velox_fn.engine import checks
from velox_fn.method import Method


def check_asked(model: Any, budget: object, queries: object, calibrate: object) -> None:
    """ValueError unless `model` is one, and the others are of the kinds that `install` takes."""
    checks.one_of("queries", queries, ("true", "proxy"))
    if isinstance(model, tuple):
        raise ValueError(
            "model is a pair, as mlx_lm.load returns it; take it apart: model, tokenizer = mlx_lm.load(...), then "
            "install(model, tokenizer=tokenizer, ...)"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be an mlx.nn.Module, such as mlx_lm.load(...)[0], got {type(model).__name__}; load it first"
        )
    if not any(calibrate is known or calibrate == known for known in ("auto", False)):
        raise ValueError(
            f'calibrate must be "auto" or False, got {calibrate!r}; to make one anew, see velox_cache.calibrate'
        )
    check_budget(budget)


def check_budget(budget: object) -> None:
    """ValueError for a budget that is no number of rows, with what was meant where that can be guessed."""
    if isinstance(budget, float):
        raise ValueError(
            f"budget={budget!r}: a budget is a number of rows, such as budget=512. A share is of something, and the "
            "prompt is not known here: velox_cache.generate(model, tokenizer, prompt, budget=0.25) takes one"
        )
    if isinstance(budget, str):
        meant = f"budget={budget.strip()}" if budget.strip().isdigit() else "for example budget=512"
        raise ValueError(f"budget={budget!r}: a budget is a number of rows, not text; write {meant}")


def check_settings(method: Method, settings: Mapping[str, Any], *, calibrated: bool = False) -> None:
    """ValueError when a method does not take these settings, budget included, or cannot work with them.

    Nothing of a model is needed: only what the settings alone tell is checked. calibrated: a calibration is given, with
    whose arrays a method may take what it refuses without them, such as a rollback.
    """
    settings = method.own_names(settings)
    for name, value in settings.items():
        if name == "rollback" and not method.rollback and name not in method.settings:
            raise ValueError(
                f"rollback={value} cannot work with {method.label}, which has no such setting: its scores change with "
                "every call, which cannot be taken back, or it keeps no rows aside; use one that has it, such as "
                "qfilters"
            )
        if name not in method.settings:
            raise ValueError(f"{method.label} has no setting {name!r}; its settings are {', '.join(method.settings)}")
    check_budget(settings.get("budget"))
    if settings.get("codebooks") is not None:  # what else they do not go with is told once their arrays are there
        check_one_storage(settings)
        settings = {name: value for name, value in settings.items() if name != "codebooks"}
    waits = method.needs_calibration or (calibrated and method.calibrated)
    if not waits and not settings.get("renumber"):  # which needs the model's rotary embedding
        method.make(**settings)
    elif {"n_sink", "recent"} <= method.settings.keys():
        given = {**method.settings, **settings}
        checks.row_limits(given["budget"], given["n_sink"], given["recent"])

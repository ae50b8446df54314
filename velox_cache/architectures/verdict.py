"""What `install` would do with a model: by layers, by the model's own queries, by turning its keys again."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.calibration.layers_with_losses import why_no_losses
from velox_cache.installation.installing import install, uninstall
from velox_cache.introspection.plan import LayerPlan, plan_layers


@dataclass(frozen=True)
class Verdict:
    """What works on one model. A reason of None says that it works."""

    layers: tuple[LayerPlan, ...]
    no_queries: str | None  # why methods that score by the model's own queries are refused
    no_renumbering: str | None  # why renumber=True is
    alone: bool  # with budgets per layer its caches serve one sequence at a time
    no_budgets: str | None = None  # why budgets per layer are refused
    no_losses: str | None = None  # why a calibration cannot measure what budgets cost

    @property
    def bounded(self) -> bool:
        return any(entry.bounded for entry in self.layers)


def verdict(model: nn.Module) -> Verdict:
    """Ask `install` itself, and undo it; what was installed on the model before is gone.

    The model runs twice, on two tokens, to see how its keys turn: that reads its weights.
    """
    layers = plan_layers(model)
    if not any(entry.bounded for entry in layers):
        reason = _joined(entry.reason for entry in layers)
        return Verdict(layers, reason, reason, False)
    return Verdict(
        layers,
        _refusal(model, "h2o", budget=64),
        _refusal(model, "streaming_llm", budget=64, renumber=True),
        *_budgets(model),
        _tried(lambda: why_no_losses(model)),
    )


def in_words(found: Verdict) -> Mapping[str, str]:
    """What works, by what it is about: each a sentence, in the order of importance."""
    bounded = [entry for entry in found.layers if entry.bounded]
    said = {"layers": f"{len(bounded)} of {len(found.layers)} layers can be bounded"}
    if bounded:
        said["rows"] = _joined(entry.reason for entry in bounded)
    if len(bounded) < len(found.layers):
        said["not bounded"] = _joined(entry.reason for entry in found.layers if not entry.bounded)
    if not bounded:
        return said
    said["queries"] = (
        "attention can be observed: methods that score by true queries work"
        if found.no_queries is None
        else f"methods that score by attention need queries='proxy' here: {found.no_queries}"
    )
    said["renumbering"] = (
        "keys can be turned as the model turns them: renumber=True works"
        if found.no_renumbering is None
        else f"renumber=True is refused: {found.no_renumbering}"
    )
    if found.no_budgets is not None:
        said["budgets"] = f"budgets per layer are refused: {found.no_budgets}"
    elif found.alone:
        said["budgets"] = (
            "with budgets per layer its caches serve one sequence at a time; with one for all, batches too"
        )
    if found.no_losses is not None:
        said["losses"] = f'shares="calibrated" is refused: {found.no_losses}'
    return said


def _refusal(model: nn.Module, method: str, **settings: Any) -> str | None:
    def reason() -> str | None:
        try:
            install(model, method, **settings)
        except ValueError as error:
            return str(error)
        finally:
            uninstall(model)
        return None

    return _tried(reason)


def _tried(reason: Callable[[], str | None]) -> str | None:
    """What `reason` says, or that the model does not run here: one of Metal kernels, where there is no Metal."""
    try:
        return reason()
    except RuntimeError as error:
        return f"could not be tried on this machine: {error}"


def _budgets(model: nn.Module) -> tuple[bool, str | None]:
    """Whether caches with budgets per layer serve one sequence at a time, and why such budgets are refused."""
    try:
        install(model, "l2norm", budget=lambda layer: 64 + layer)
        return not all(hasattr(cache, "merge") for cache in make_prompt_cache(model)), None
    except ValueError as error:
        return False, str(error)
    finally:
        uninstall(model)


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))

"""What `install` would do with a model: by layers, by the model's own queries, by turning its keys again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from velox_cache.installation.installing import install, uninstall
from velox_cache.introspection.plan import LayerPlan, asks_for_mask_arrays, plan_layers


@dataclass(frozen=True)
class Verdict:
    """What works on one model. A reason of None says that it works."""

    layers: tuple[LayerPlan, ...]
    no_queries: str | None  # why methods that score by the model's own queries are refused
    no_renumbering: str | None  # why renumber=True is
    mask_arrays: bool  # one mask array serves all layers, which therefore need one budget

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
        asks_for_mask_arrays(model),
    )


def _refusal(model: nn.Module, method: str, **settings: Any) -> str | None:
    try:
        install(model, method, **settings)
    except ValueError as error:
        return str(error)
    except RuntimeError as error:  # a model of Metal kernels, where there is no Metal
        return f"could not be tried on this machine: {error}"
    finally:
        uninstall(model)
    return None


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))

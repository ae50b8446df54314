"""Put evicting caches into a model, so that everything in mlx_lm that asks it for caches gets them."""

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.adapter import EvictingKVCache
from velox_cache.builder import layer_filters
from velox_cache.plan import LayerPlan, check_filter_layout, make_caches, plan_layers
from velox_cache.qfilters_artifact import QFiltersCalibration, load_qfilters
from velox_cache.query_tap import QueryTap
from velox_fn import checks
from velox_fn.eviction import Eviction
from velox_fn.registry import method_factory

Filters = str | os.PathLike[str] | QFiltersCalibration


@dataclass(frozen=True)
class InstallReport:
    """What `install` did, layer by layer."""

    method: str
    settings: Mapping[str, Any]
    layers: tuple[LayerPlan, ...]

    def __str__(self) -> str:
        bounded = [entry for entry in self.layers if entry.bounded]
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        lines = [f"{self.method} ({settings}) bounds {len(bounded)} of {len(self.layers)} layers"]
        for reason in dict.fromkeys(entry.reason for entry in self.layers if not entry.bounded):
            skipped = [str(entry.layer) for entry in self.layers if entry.reason == reason]
            lines.append(f"  not bounded, layers {', '.join(skipped)}: {reason}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class InstalledCaches:
    """What stands in a model's `make_cache`: each call makes fresh caches."""

    model: nn.Module
    plan: tuple[LayerPlan, ...]
    methods: Mapping[int, Eviction]
    tap: QueryTap | None

    def __call__(self) -> list[Any]:
        return make_caches(
            self.model, self.plan, lambda layer: EvictingKVCache(self.methods[layer], true_queries=self.tap is not None)
        )


def install(
    model: nn.Module,
    method: str = "qfilters",
    *,
    filters: Filters | None = None,
    queries: str = "true",
    **settings: Any,
) -> InstallReport:
    """Make `model` use evicting caches wherever mlx_lm asks it for a prompt cache.

    settings: the arguments of the method's factory, such as budget, n_sink, recent. `recent` defaults to a quarter of
    the budget here, since without it next-token prediction loses the tokens it needs most. filters: for Q-Filters, a
    calibration or the path of one. queries: for methods that score by attention, "true" taps the model's own queries,
    "proxy" lets the incoming keys stand in.

    Only layers with a plain full-attention cache are bounded; the report says what happened to each. A second install
    replaces the first; `uninstall` undoes it.

    Raises ValueError when the method or a setting is unknown or cannot work, when filters do not fit the model, when no
    layer can be bounded, or when true queries are asked for and the model's attention cannot be tapped.
    """
    checks.one_of("queries", queries, ("true", "proxy"))
    plan = plan_layers(model)
    if not any(entry.bounded for entry in plan):
        raise ValueError(f"no layer of this model can be bounded: {'; '.join({entry.reason for entry in plan})}")
    factory = method_factory(method)
    arguments = _with_default_recent(factory, _checked(factory, method, settings))
    calibration = load_qfilters(filters) if isinstance(filters, str | os.PathLike) else filters
    methods = {}
    for entry in plan:
        if entry.bounded:
            params: dict[str, mx.array] = {}
            if calibration is not None:
                params["filters"] = layer_filters(calibration, entry.layer)
            layer = {"layer": entry.layer} if "layer" in inspect.signature(factory).parameters else {}
            methods[entry.layer] = factory(**arguments, **params, **layer)
            check_filter_layout(model, entry.layer, methods[entry.layer])
    uninstall(model)
    any_method = next(iter(methods.values()))
    tap = QueryTap(model).install() if any_method.needs_queries and queries == "true" else None
    model.make_cache = InstalledCaches(model, plan, methods, tap)
    return InstallReport(any_method.name, any_method.settings, plan)


def uninstall(model: nn.Module) -> None:
    """Give `model` its own caches back. Does nothing when nothing is installed."""
    installed = model.__dict__.get("make_cache")
    if isinstance(installed, InstalledCaches):
        if installed.tap is not None:
            installed.tap.remove()
        del model.__dict__["make_cache"]


def _checked(factory: Any, method: str, settings: dict[str, Any]) -> dict[str, Any]:
    known = [name for name in inspect.signature(factory).parameters if name not in ("filters", "layer")]
    for name in settings:
        if name not in known:
            raise ValueError(f"{method} has no setting {name!r}; its settings are {', '.join(known)}")
    return dict(settings)


def _with_default_recent(factory: Any, settings: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    if "recent" not in parameters or "recent" in settings:
        return settings
    budget = settings.get("budget", parameters["budget"].default)
    n_sink = settings.get("n_sink", parameters["n_sink"].default)
    if not all(isinstance(value, int) for value in (budget, n_sink)):
        return settings  # the factory says what is wrong
    return {**settings, "recent": max(0, min(budget // 4, budget - n_sink - 1))}

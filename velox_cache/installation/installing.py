"""Put evicting caches into a model, so that everything in mlx_lm that asks it for caches gets them."""

import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache, MissingQueriesError
from velox_cache.calibration.artifact import QFiltersCalibration, load_qfilters
from velox_cache.calibration.fusion_choice import recent_share
from velox_cache.installation.layer_arguments import CALIBRATED, PLACE, layer_arguments
from velox_cache.installation.layer_budgets import Budgets, SoloKVCache, layer_budgets
from velox_cache.introspection.plan import LayerPlan, check_filter_layout, make_caches, plan_layers
from velox_cache.introspection.query_tap import QueryTap, flat_caches, model_type
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.shard import model_shard
from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction
from velox_fn.registry import method_factory

Filters = str | os.PathLike[str] | QFiltersCalibration


@dataclass(frozen=True)
class InstallReport:
    """What `install` did, layer by layer."""

    method: str
    settings: Mapping[str, Any]  # "budget" is a list, one entry per bounded layer, where layers have their own
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
    cache_class: type[EvictingKVCache]
    tap: QueryTap | None
    before: Callable[[], list[Any]] | None  # a make_cache of the user's own that this one stands in for

    def __call__(self) -> list[Any]:
        return make_caches(
            self.model,
            self.plan,
            lambda layer: self.cache_class(self.methods[layer], true_queries=self.tap is not None),
        )


def install(
    model: nn.Module,
    method: str = "qfilters",
    *,
    budget: int | Budgets | None = None,
    filters: Filters | None = None,
    queries: str = "true",
    group: mx.distributed.Group | None = None,
    **settings: Any,
) -> InstallReport:
    """Make `model` use evicting caches wherever mlx_lm asks it for a prompt cache.

    budget: most rows kept per layer; a list with one number per layer, or a function of the layer's index, gives each
    layer its own, for one sequence at a time (`layer_budgets`). settings: the other arguments of the method's factory,
    such as n_sink, recent. `recent` defaults to three quarters of the budget here: of the shares tried, it follows the
    full cache's next-token distribution best (docs/evaluation.md); without recent rows prediction loses the tokens it
    needs most. Where a search has found another share for a fusion (docs/fusion.md), it defaults to that. filters: a
    calibration or the path of one, for the methods that take something from it. queries: for methods that score by
    attention, "true" taps the model's own queries, "proxy" lets the incoming keys stand in.

    On a model that is spread over several processes, by `model.shard(group)` or `model.model.pipeline(group)`, each of
    them installs: its caches hold its own heads and layers, with their part of `filters`, which are the whole model's,
    as budgets per layer are. group: only for a model whose sharding cannot be seen (`model_shard`).

    Only layers with a plain full-attention cache are bounded; the report says what happened to each. A second install
    replaces the first; `uninstall` undoes it. With true queries the model runs once, on two tokens, to see that each
    bounded layer shows its queries; for a method that turns keys it runs twice more, to see how (`ModelRopes`).

    Raises ValueError when the method or a setting is unknown or cannot work, when filters do not fit the model, when no
    layer can be bounded, or when true queries are asked for and the model's attention cannot be tapped.
    """
    checks.one_of("queries", queries, ("true", "proxy"))
    plan, shard = plan_layers(model), model_shard(model, group)
    if not any(entry.bounded for entry in plan) and not shard.pipelined:
        raise ValueError(f"no layer of this model can be bounded: {'; '.join({entry.reason for entry in plan})}")
    factory = method_factory(method)
    _check_names(factory, method, settings)
    if not any(entry.bounded for entry in plan):  # other ranks of the pipeline have the layers that can be
        return InstallReport(method, settings, plan)
    own_budgets = None
    if callable(budget) or (isinstance(budget, Sequence) and not isinstance(budget, str)):
        own_budgets = layer_budgets(model, plan, shard.budgets(budget, len(plan)))
    calibration = load_qfilters(filters) if isinstance(filters, str | os.PathLike) else filters
    if calibration is not None and not isinstance(calibration, QFiltersCalibration):
        raise ValueError(
            f"filters must be a calibration or the path of one, got {type(filters).__name__}; wrap arrays [H,D], one "
            "per layer, in QFiltersCalibration(arrays)"
        )
    calibration = None if calibration is None else shard.calibration(calibration, len(plan))
    methods, ropes = {}, ModelRopes(model)
    for entry in plan:
        if entry.bounded:
            layer_budget = budget if own_budgets is None else own_budgets[entry.layer]
            arguments = settings if layer_budget is None else {"budget": layer_budget, **settings}
            of_layer = layer_arguments(factory, arguments, model, entry.layer, calibration, shard, ropes)
            arguments = {**arguments, **of_layer}
            share = recent_share(factory, settings, calibration)
            methods[entry.layer] = factory(**_with_default_recent(factory, arguments, share))
            check_filter_layout(model, entry.layer, methods[entry.layer])
    any_method = next(iter(methods.values()))
    tap = QueryTap(model).install() if any_method.needs_queries and queries == "true" else None
    cache_class = EvictingKVCache if own_budgets is None else SoloKVCache
    before = model.__dict__.get("make_cache")
    before = before.before if isinstance(before, InstalledCaches) else before
    installed = InstalledCaches(model, plan, methods, cache_class, tap, before)
    if tap is not None:
        _probe_queries(installed, tap)
    uninstall(model)  # only now, so that an install that is refused leaves the one before it in place
    model.make_cache = installed
    if tap is not None:
        weakref.finalize(model, tap.remove)  # else a model that is dropped would leave its tap in shared code
    shown = {**any_method.settings, **({} if own_budgets is None else {"budget": list(own_budgets.values())})}
    return InstallReport(any_method.name, shown, plan)


def uninstall(model: nn.Module) -> None:
    """Give `model` its own caches back. Does nothing when nothing is installed."""
    installed = model.__dict__.get("make_cache")
    if isinstance(installed, InstalledCaches):
        if installed.tap is not None:
            installed.tap.remove()
        del model.__dict__["make_cache"]
        if installed.before is not None:
            model.make_cache = installed.before


def _probe_queries(installed: InstalledCaches, tap: QueryTap) -> None:
    """ValueError, with the tap removed, unless a call of the model shows every bounded layer its queries."""
    try:
        caches = installed()
        installed.model(mx.array([[0, 1]]), cache=caches)
        unseen = [entry.layer for entry, cache in zip(installed.plan, caches, strict=True) if not _observed(cache)]
        if unseen:
            raise ValueError(
                f"model type {model_type(installed.model)!r} computes the attention of layers {unseen} by hand, where "
                "its queries cannot be seen; use queries='proxy', or a method that needs no queries, such as qfilters"
            )
    except BaseException:
        tap.remove()
        raise


def _observed(cache: Any) -> bool:
    try:
        mx.eval([part.state for part in flat_caches([cache]) if isinstance(part, EvictingKVCache)])
    except MissingQueriesError:
        return False
    return True


def _check_names(factory: Any, method: str, settings: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(factory).parameters if name not in (*CALIBRATED, *PLACE)]
    for name, value in settings.items():
        if name == "rollback" and name not in known:
            raise ValueError(
                f"rollback={value} cannot work with {method}: its scores accumulate with every query, so tokens "
                "that are taken back have already changed them; use a method that scores a row once, such as qfilters"
            )
        if name not in known:
            raise ValueError(f"{method} has no setting {name!r}; its settings are {', '.join(known)}")


def _with_default_recent(factory: Any, settings: Mapping[str, Any], share: float) -> Mapping[str, Any]:
    parameters = inspect.signature(factory).parameters
    if "recent" not in parameters or "recent" in settings or "budget" not in parameters:
        return settings
    budget = settings.get("budget", parameters["budget"].default)
    n_sink = settings.get("n_sink", parameters["n_sink"].default if "n_sink" in parameters else 0)
    if not all(isinstance(value, int) for value in (budget, n_sink)):
        return settings  # the factory says what is wrong
    return {**settings, "recent": max(0, min(int(share * budget), budget - n_sink - 1))}

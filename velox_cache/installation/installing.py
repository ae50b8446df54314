"""Put evicting caches into a model, so that everything in mlx_lm that asks it for caches gets them."""

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache, MissingQueriesError
from velox_cache.caches.protocol import check_protocol
from velox_cache.calibration.artifact import QFiltersCalibration
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.fusion_weights import RECENT_SHARE, recent_share
from velox_cache.calibration.made_once import about
from velox_cache.installation.asked import check_asked, check_settings, with_default_recent
from velox_cache.installation.calibration_of import Filters, calibration_of
from velox_cache.installation.footprint import Footprint, footprint
from velox_cache.installation.layer_arguments import check_heads_together, layer_arguments
from velox_cache.installation.layer_budgets import (
    Budgets,
    LayerBudgetKVCache,
    SoloKVCache,
    layer_budgets,
    takes_own_masks,
)
from velox_cache.installation.own_part import part_of_budgets, part_of_calibration
from velox_cache.installation.parts import call_in_parts, call_whole
from velox_cache.introspection.plan import LayerPlan, check_filter_layout, make_caches, plan_layers
from velox_cache.introspection.query_tap import QueryTap, flat_caches, model_type
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.row_bytes import row_bytes
from velox_cache.introspection.shard import ModelShard, model_shard
from velox_cache.known_methods import as_method
from velox_cache.recommended import RECOMMENDED_METHOD
from velox_fn.engine.eviction import Eviction
from velox_fn.method import PLACES, Method
from velox_fn.registry import find_method


@dataclass(frozen=True)
class InstallReport:
    """What `install` did, layer by layer, and what it means for a sequence."""

    method: str
    settings: Mapping[str, Any]  # a list, one entry per bounded layer, where layers differ
    layers: tuple[LayerPlan, ...]
    footprint: Footprint | None = None  # bytes before and now; None where rows do not say how large they are
    calibration: str | None = None  # of what, on what, and how well it predicts; None: none is used

    def __str__(self) -> str:
        bounded = [entry for entry in self.layers if entry.bounded]
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        lines = [f"{self.method} ({settings}) bounds {len(bounded)} of {len(self.layers)} layers"]
        for reason in dict.fromkeys(entry.reason for entry in self.layers if not entry.bounded):
            skipped = [str(entry.layer) for entry in self.layers if entry.reason == reason]
            lines.append(f"  not bounded, layers {', '.join(skipped)}: {reason}")
        lines += [f"  {fact}" for fact in (self.footprint, self.calibration) if fact is not None]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class InstalledCaches:
    """What stands in a model's `make_cache`: each call makes fresh caches.

    It is held by the model and does not hold it in turn: so a model that is dropped is freed by its reference count,
    and its tap is removed.
    """

    model: weakref.ref[nn.Module]
    plan: tuple[LayerPlan, ...]
    methods: Mapping[int, Eviction]
    cache_class: type[EvictingKVCache]
    true_queries: bool
    tap: QueryTap | None
    snapshots: int
    before: Callable[[], list[Any]] | None  # a make_cache of the user's own that this one stands in for

    def owning_tap(self) -> "InstalledCaches":
        """The same, whose tap goes when it does: else a model that is dropped would leave its tap in shared code."""
        if self.tap is not None:
            weakref.finalize(self, self.tap.remove)
        return self

    def __call__(self) -> list[Any]:
        model = self.model()
        if model is None:
            raise ReferenceError("the model of this make_cache is gone; keep the model, and call model.make_cache()")
        most = max(method.settings.get("budget", 0) for method in self.methods.values())
        asked = _max_kv_size_asked_for()
        if asked is not None and asked < most:
            warnings.warn(
                f"max_kv_size={asked} has no effect on a model with evicting caches, which hold up to {most} rows; "
                f"install with budget={asked}, or drop max_kv_size",
                stacklevel=3,
            )
        return make_caches(
            model,
            self.plan,
            lambda layer: self.cache_class(
                self.methods[layer], true_queries=self.true_queries, snapshots=self.snapshots
            ),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "InstalledCaches":
        """Inside a copy of the model: that copy's own."""
        twin = memo.get(id(self.model()))
        copied = replace(
            self,
            model=self.model if twin is None else weakref.ref(twin),
            tap=copy.deepcopy(self.tap, memo),
            before=copy.deepcopy(self.before, memo),
        )
        return copied.owning_tap()


def install(
    model: nn.Module,
    method: str | Method | Eviction | Callable[..., Eviction] = RECOMMENDED_METHOD,
    *,
    budget: int | Budgets | None = None,
    filters: Filters | None = None,
    calibrate: bool | str = "auto",
    tokenizer: Tokenizer | None = None,
    queries: str = "true",
    snapshots: int = 0,
    group: mx.distributed.Group | None = None,
    **settings: Any,
) -> InstallReport:
    """Make `model` use evicting caches wherever mlx_lm asks it for a prompt cache.

    method: its name, one of `velox methods` or registered by `velox_fn.register`; its factory, such as
    `velox_fn.qfilters` or one of your own; or an Eviction, which every layer then runs as it is, so that it takes no
    budget, filters or settings here.
    budget: most rows kept per layer; a list with one number per layer, or a function of the layer's index, gives each
    layer its own (`layer_budgets`). settings: the other arguments of the method's factory,
    such as n_sink, recent. `recent` defaults to three quarters of the budget here: of the shares tried, it follows the
    full cache's next-token distribution best (docs/evaluation.md); without recent rows prediction loses the tokens it
    needs most. Where a search has found another share for a fusion (docs/fusion.md), it defaults to that.

    filters: a calibration or the path of one, for the methods that take something from it. Without it, and with
    calibrate="auto", a method that does not work well without one takes the calibration of these weights in the cache
    folder; where there is none yet, it is made once, with `tokenizer`, on text that comes with Python, and a line on
    stderr says where it lies. calibrate=False: none is looked for or made.

    queries: for methods that score by attention, "true" taps the model's own queries, "proxy" lets the incoming keys
    stand in.

    interval, a setting of every method: rows leave only when the tokens seen pass a multiple of it, so that what a
    token sees does not depend on how the text was cut into calls; up to budget + interval rows are held. Calls of the
    model that cross a boundary are taken apart there. snapshots: how many earlier boundaries `trim` can go back beyond;
    each takes the memory of one more cache.

    On a model that is spread over several processes, by `model.shard(group)` or `model.model.pipeline(group)`, each of
    them installs: its caches hold its own heads and layers, with their part of `filters`, which are the whole model's,
    as budgets per layer are. group: only for a model whose sharding cannot be seen (`model_shard`).

    Only layers with a plain full-attention cache are bounded; the report says what happened to each. A second install
    replaces the first; `uninstall` undoes it. With true queries the model runs once, on two tokens, to see that each
    bounded layer shows its queries; for a method that turns keys it runs twice more, to see how (`ModelRopes`).

    Raises ValueError when the method or a setting is unknown or cannot work, when the calibration is of other weights,
    or none is there and no tokenizer to make it with, when no layer can be bounded, or when true queries are asked for
    and the model's attention cannot be tapped; RuntimeError when the installed mlx_lm speaks another cache protocol.
    """
    check_asked(model, budget, queries, calibrate)
    check_protocol()
    plan, shard = plan_layers(model), model_shard(model, group)
    if not any(entry.bounded for entry in plan) and not shard.pipelined:
        raise ValueError(f"no layer of this model can be bounded: {'; '.join({entry.reason for entry in plan})}")
    chosen = _chosen(method, budget=budget, filters=filters, **settings)
    if not any(entry.bounded for entry in plan):  # other ranks of the pipeline have the layers that can be
        return InstallReport(chosen.name if isinstance(chosen, Eviction) else chosen.label, settings, plan)
    if isinstance(chosen, Eviction):
        calibration, methods = None, _of_every_layer(chosen, model, plan, shard)
    else:
        one_layer = next(entry.layer for entry in plan if entry.bounded)
        calibration = calibration_of(chosen, settings, filters, calibrate, tokenizer, model, one_layer)
        methods = _by_layer(chosen, settings, budget, calibration, model, plan, shard)
    any_method = next(iter(methods.values()))
    true_queries = any_method.needs_queries and queries == "true"
    before = model.__dict__.get("make_cache")
    before = before.before if isinstance(before, InstalledCaches) else before
    installed = InstalledCaches(
        weakref.ref(model), plan, methods, EvictingKVCache, true_queries, None, snapshots, before
    )
    if true_queries:
        installed = replace(installed, tap=QueryTap(model).install())
        _probe_queries(model, installed)
    if _has_own_budgets(budget):
        installed = _with_own_masks(model, installed)
    uninstall(model)  # only now, so that an install that is refused leaves the one before it in place
    model.make_cache = installed.owning_tap()
    if any_method.settings.get("interval", 1) > 1:
        call_in_parts(model)
    return InstallReport(
        any_method.name,
        _settings_of_all(list(methods.values())),
        plan,
        footprint(row_bytes(model), methods),
        None if calibration is None else about(calibration),
    )


def uninstall(model: nn.Module) -> None:
    """Give `model` its own caches back. Does nothing when nothing is installed."""
    installed = model.__dict__.get("make_cache")
    if isinstance(installed, InstalledCaches):
        if installed.tap is not None:
            installed.tap.remove()
        del model.__dict__["make_cache"]
        call_whole(model)
        if installed.before is not None:
            model.make_cache = installed.before


def _chosen(given: str | Method | Eviction | Callable[..., Eviction], **arguments: Any) -> Method | Eviction:
    """The method that `install` was given. ValueError when it is none, or does not take these arguments."""
    if not isinstance(given, Eviction):
        method = as_method(given)
        settings = {name: value for name, value in arguments.items() if name != "filters"}
        if settings["budget"] is None or _has_own_budgets(settings["budget"]):
            del settings["budget"]
        check_settings(method, with_default_recent(method, settings, RECENT_SHARE))
        return method
    told = [name for name, value in arguments.items() if value is not None]
    if told:
        raise ValueError(
            f"an Eviction has its budget and settings already, and {', '.join(told)} cannot change it; give them to "
            "the factory that made it, or install the factory"
        )
    return given


def _of_every_layer(
    method: Eviction, model: nn.Module, plan: Sequence[LayerPlan], shard: ModelShard
) -> dict[int, Eviction]:
    known = find_method(method.name)
    if known is not None:
        check_heads_together(known, shard)
    layers = [entry.layer for entry in plan if entry.bounded]
    for layer in layers:
        check_filter_layout(model, layer, method)
    return dict.fromkeys(layers, method)


def _by_layer(
    method: Method,
    settings: Mapping[str, Any],
    budget: int | Budgets | None,
    calibration: QFiltersCalibration | None,
    model: nn.Module,
    plan: Sequence[LayerPlan],
    shard: ModelShard,
) -> dict[int, Eviction]:
    """Each bounded layer's method, with its own budget and its own part of the calibration."""
    own_budgets = None
    if _has_own_budgets(budget):
        own_budgets = layer_budgets(model, plan, part_of_budgets(shard, budget, len(plan)))
    calibration = None if calibration is None else part_of_calibration(shard, calibration, len(plan))
    share = recent_share(method, settings, calibration)
    methods, ropes = {}, ModelRopes(model)
    for layer in (entry.layer for entry in plan if entry.bounded):
        arguments = dict(settings)
        if own_budgets is not None:
            arguments["budget"] = own_budgets[layer]
        elif budget is not None:
            arguments["budget"] = budget
        arguments |= layer_arguments(method, arguments, model, layer, calibration, shard, ropes)
        try:
            methods[layer] = method.make(**with_default_recent(method, arguments, share))
        except ValueError as error:
            if own_budgets is None:  # what is wrong is wrong in every layer
                raise
            raise ValueError(f"layer {shard.first_layer + layer}: {error}") from error
        check_filter_layout(model, layer, methods[layer])
    return methods


def _has_own_budgets(budget: int | Budgets | None) -> TypeGuard[Budgets]:
    return callable(budget) or (isinstance(budget, Sequence) and not isinstance(budget, str))


def _with_own_masks(model: nn.Module, installed: InstalledCaches) -> InstalledCaches:
    """The same with caches for budgets per layer, and the tap that a batch of them needs where the model takes it."""
    batching = replace(installed, cache_class=LayerBudgetKVCache)
    try:
        batching = replace(batching, tap=installed.tap or QueryTap(model).install())
    except ValueError:
        return replace(installed, cache_class=SoloKVCache)
    if takes_own_masks(model, batching):
        return batching
    if installed.tap is None and batching.tap is not None:
        batching.tap.remove()
    return replace(installed, cache_class=SoloKVCache)


def _probe_queries(model: nn.Module, installed: InstalledCaches) -> None:
    """ValueError, with the tap removed, unless a call of the model shows every bounded layer its queries."""
    try:
        caches = installed()
        model(mx.array([[0, 1]]), cache=caches)
        unseen = [entry.layer for entry, cache in zip(installed.plan, caches, strict=True) if not _observed(cache)]
        if unseen:
            raise ValueError(
                f"model type {model_type(model)!r} does the attention of layers {unseen} by hand, or over "
                "arrays that their caches did not return, where its queries cannot be seen; use queries='proxy', or a "
                "method that needs no queries, such as qfilters"
            )
    except BaseException:
        if installed.tap is not None:
            installed.tap.remove()
        raise


def _observed(cache: Any) -> bool:
    try:
        for part in flat_caches([cache]):
            _ = part.state if isinstance(part, EvictingKVCache) else None  # nothing is evaluated
    except MissingQueriesError:
        return False
    return True


def _settings_of_all(methods: Sequence[Eviction]) -> dict[str, Any]:
    """The settings of every layer's method: the value where all agree, else a list. A layer's place is no setting."""
    by_name = {
        name: [method.settings[name] for method in methods] for name in methods[0].settings if name not in PLACES
    }
    return {
        name: values[0] if all(value == values[0] for value in values) else values for name, values in by_name.items()
    }


def _max_kv_size_asked_for() -> int | None:
    """The `max_kv_size` of the call of `make_prompt_cache` that a `make_cache` answers, None without one.

    That function, mlx_lm's and its copies, drops the argument when it calls the model's make_cache. It is imported by
    name in many places, so it is not wrapped: its frame is looked at.
    """
    caller = sys._getframe(2)  # of the frames in between no name is kept: one that names itself is a cycle
    asked = caller.f_locals.get("max_kv_size") if caller.f_code.co_name == "make_prompt_cache" else None
    return asked if isinstance(asked, int) else None

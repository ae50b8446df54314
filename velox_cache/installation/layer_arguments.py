"""What a method's factory is told about one layer: its calibrated arrays, its index, its rotary embedding."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.artifact import QFiltersCalibration
from velox_cache.calibration.statistics import LayerStatistics
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.shard import WHOLE, ModelShard
from velox_fn.engine.eviction import Eviction
from velox_fn.methods.fusion import PER_TERM, arrays_taken, term_names
from velox_fn.registry import METHODS

CALIBRATED = ("filters", "mean_keys", "query_mean", "query_cov", *PER_TERM)
"""The factory arguments that come from a calibration."""

PLACE = ("layer", "first_head")
"""The factory arguments that say where in the whole model a cache stands."""

POOLS_HEADS = (METHODS["tova"],)
"""Methods that score a row by all heads of its layer together."""

NEED_CALIBRATION = (METHODS["fusion"],)
"""Methods that can do nothing without one."""


def takes_calibration(factory: Callable[..., Eviction]) -> bool:
    """Whether a method can use a calibration."""
    return any(name in CALIBRATED for name in inspect.signature(factory).parameters)


def calibration_for(
    factory: Callable[..., Eviction], calibration: QFiltersCalibration | None
) -> QFiltersCalibration | None:
    """The calibration for a method that can use one, None for the others, which refuse it."""
    return calibration if takes_calibration(factory) else None


def layer_arguments(
    factory: Callable[..., Eviction],
    settings: Mapping[str, Any],
    model: nn.Module,
    layer: int,
    calibration: QFiltersCalibration | None,
    shard: ModelShard = WHOLE,
    ropes: ModelRopes | None = None,
) -> dict[str, Any]:
    """The arguments that `factory` takes beside `settings`, for one layer of `model`.

    calibration: what of one belongs to `shard`, the part of the model that this process holds. ropes: the model's, for
    callers who ask for several layers.

    Raises ValueError when a method needs a calibration and there is none, when the calibration has nothing for the
    method or the layer, when a method that renumbers needs a rotary embedding and the model's cannot be read, or when a
    method pools heads that are on several ranks.
    """
    if shard.head_parts > 1 and factory in POOLS_HEADS:
        raise ValueError(
            f"this method scores a row by all heads of a layer together, and here they are spread over "
            f"{shard.head_parts} ranks, which share nothing of their caches; spread the model's layers instead "
            "(pipeline), or take a method that scores each head by itself, such as qfilters or h2o"
        )
    if calibration is None and factory in NEED_CALIBRATION:
        raise ValueError(
            "this method scores rows in units that come from a calibration, and none is given: run `velox calibrate`, "
            "and give the file that it makes as filters= (--filters)"
        )
    wanted = inspect.signature(factory).parameters
    arguments: dict[str, Any] = {}
    if calibration is not None:
        arguments |= calibrated_params(factory, calibration, layer, settings)
    if "layer" in wanted:
        arguments["layer"] = shard.first_layer + layer
    if "first_head" in wanted:
        arguments["first_head"] = shard.first_head(model, layer)
    if "rope" in wanted and settings.get("rope") is None:
        ropes = ModelRopes(model) if ropes is None else ropes
        if settings.get("renumber"):
            arguments["rope"] = ropes.of_layer(layer)
        elif "renumber" not in wanted and calibration is None:  # a method that does better with it, and can do without
            try:
                arguments["rope"] = ropes.of_layer(layer)
            except ValueError:
                arguments["rope"] = None
    return arguments


def calibrated_params(
    factory: Callable[..., Eviction],
    calibration: QFiltersCalibration,
    layer: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, mx.array]:
    """The calibrated arrays of one layer that `factory` takes under these settings, by argument name."""
    parameters = inspect.signature(factory).parameters
    names = [name for name in parameters if name in CALIBRATED]
    if not names:
        raise ValueError("this method uses no calibration; leave the calibration out")
    terms: tuple[str, ...] = ()
    if "terms" in parameters:
        terms = term_names(settings.get("terms", parameters["terms"].default))
        names = list(arrays_taken(terms))
    if names == ["filters"]:
        return {"filters": _of_layer(calibration.filters, layer, "filters")}
    if not calibration.statistics:
        raise ValueError(
            f"the calibration holds filters only, and not {' and '.join(names)}: it was made by an older velox-kv, or "
            "published by the filters' authors; calibrate again with `velox calibrate`"
        )
    statistics = _of_layer(calibration.statistics, layer, "statistics")
    arrays = {"filters": calibration.filters[layer], **statistics.arrays()}
    if terms:
        arrays |= _term_moments(calibration.terms, statistics, terms)
        combine = settings.get("combine", parameters["combine"].default)
        if calibration.fusion is not None and calibration.fusion.is_of(terms, combine):
            arrays["weights"] = statistics.fusion_weights
            names.append("weights")
    return {name: arrays[name] for name in names}


def _term_moments(known: Sequence[str], statistics: LayerStatistics, terms: Sequence[str]) -> dict[str, mx.array]:
    """The columns of the terms, by argument name. Raises ValueError when the calibration lacks one."""
    means, deviations = statistics.term_means, statistics.term_deviations
    lacking = [name for name in terms if name not in known]
    if lacking or means is None or deviations is None:
        raise ValueError(
            f"the calibration has no means and deviations of {', '.join(lacking)}: it was made by an older velox-kv; "
            "calibrate again with `velox calibrate`"
        )
    columns = mx.array([known.index(name) for name in terms])
    return {"means": means[:, columns], "deviations": deviations[:, columns]}


def _of_layer(per_layer: Any, layer: int, what: str) -> Any:
    found = per_layer[layer] if layer < len(per_layer) else None
    if found is None:
        raise ValueError(
            f"the calibration has no {what} for layer {layer} (it covers {len(per_layer)} layers); it was made for "
            "another model, or for one with other caches: calibrate this model"
        )
    return found

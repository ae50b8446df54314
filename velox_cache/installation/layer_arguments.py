"""What a method's factory is told about one layer: its calibrated arrays, its index, its rotary embedding."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.statistics import LayerStatistics
from velox_cache.introspection.key_layouts import KeyLayouts
from velox_cache.introspection.latents import caches_latents
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.shard import WHOLE, ModelShard
from velox_fn.method import Method
from velox_fn.methods.fusion import arrays_taken, term_names


def calibration_for(method: Method, calibration: Calibration | None) -> Calibration | None:
    """The calibration for a method that can use one, None for the others, which refuse it."""
    return calibration if method.calibrated else None


def layer_arguments(
    method: Method,
    settings: Mapping[str, Any],
    model: nn.Module,
    layer: int,
    calibration: Calibration | None,
    shard: ModelShard = WHOLE,
    ropes: ModelRopes | None = None,
    layouts: KeyLayouts | None = None,
) -> dict[str, Any]:
    """The arguments that `method` takes beside `settings`, for one layer of `model`.

    calibration: what of one belongs to `shard`, the part of the model that this process holds. ropes, layouts: the
    model's, for callers who ask for several layers.

    Raises ValueError when a method needs a calibration and there is none, when the calibration has nothing for the
    method or the layer, when a method that renumbers needs a rotary embedding and the model's cannot be read, or when a
    method pools heads that are on several ranks.
    """
    check_heads_together(method, shard)
    if calibration is None and method.needs_calibration:
        raise ValueError(
            "this method scores rows in units that come from a calibration, and none is given: run `velox calibrate`, "
            "and give the file that it makes as calibration= (--calibration)"
        )
    arguments: dict[str, Any] = {}
    if calibration is not None:
        arguments |= calibrated_params(method, calibration, layer, settings)
    if "layer" in method.place:
        arguments["layer"] = shard.first_layer + layer
    if "first_head" in method.place:
        arguments["first_head"] = _first_head(model, layer, shard, layouts)
    if method.rope is not None and settings.get("rope") is None:
        ropes = ModelRopes(model) if ropes is None else ropes
        if method.rope == "always" or (method.rope == "to renumber" and settings.get("renumber")):
            arguments["rope"] = ropes.of_layer(layer)
        elif method.rope == "when read" and calibration is None:  # it does better with it, and can do without
            try:
                arguments["rope"] = ropes.of_layer(layer)
            except ValueError:
                arguments["rope"] = None
    return arguments


def check_heads_together(method: Method, shard: ModelShard) -> None:
    """ValueError when the method pools heads that are on several ranks."""
    if shard.head_parts > 1 and method.pools_heads:
        raise ValueError(
            f"this method scores a row by all heads of a layer together, and here they are spread over "
            f"{shard.head_parts} ranks, which share nothing of their caches; spread the model's layers instead "
            "(pipeline), or take a method that scores each head by itself, such as qfilters or h2o"
        )


def check_queries_together(shard: ModelShard, model: nn.Module) -> None:
    """ValueError when rows are scored by the queries of heads that are on several ranks."""
    if shard.head_parts > 1 and caches_latents(model):
        raise ValueError(
            f"the model's own queries score a latent row by all heads of a layer together, and here they are spread "
            f"over {shard.head_parts} ranks, which share nothing of their caches; spread the model's layers instead "
            "(pipeline), or use queries='proxy', or a method that needs no queries"
        )


def _first_head(model: nn.Module, layer: int, shard: ModelShard, layouts: KeyLayouts | None) -> int:
    if shard.head_parts == 1:
        return 0
    layout = (KeyLayouts(model) if layouts is None else layouts).of_layer(layer)
    if layout is None:
        raise ValueError(
            f"layer {layer} does not say how many KV heads it has, so this rank's cannot be numbered; use a method "
            "other than random"
        )
    return shard.first_head(model, layout.n_kv_heads)


def calibrated_params(
    method: Method,
    calibration: Calibration,
    layer: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, mx.array]:
    """The calibrated arrays of one layer that `method` takes under these settings, by argument name."""
    names = list(method.calibrated)
    if not names:
        raise ValueError("this method uses no calibration; leave the calibration out")
    asked = {**method.defaults, **settings}
    terms: tuple[str, ...] = ()
    if method.fuses:
        terms = term_names(asked["terms"])
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
        if calibration.fusion is not None and calibration.fusion.is_of(terms, asked["combine"]):
            arrays["weights"] = statistics.fusion_weights
            names.append("weights")
    lacking = [name for name in names if name not in arrays]
    if lacking:
        raise ValueError(
            f"the calibration has no {', '.join(lacking)}: it was made by an older velox-kv, without learned scores, "
            "or for a model whose rotary embedding cannot be read; calibrate again with `velox calibrate`"
        )
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

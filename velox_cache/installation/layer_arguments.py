"""What a method's factory is told about one layer: its calibrated arrays, its index, its rotary embedding."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.method_arrays import layer_arrays
from velox_cache.introspection.key_layouts import KeyLayouts
from velox_cache.introspection.latents import caches_latents
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.shard import WHOLE, ModelShard
from velox_fn.method import Method


def calibration_for(
    method: Method, calibration: Calibration | None, settings: Mapping[str, Any] = MappingProxyType({})
) -> Calibration | None:
    """The calibration for a method that can use one under these settings, None for the others, which refuse it."""
    return calibration if method.calibrated or settings.get("codebooks") is not None else None


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
    arguments: dict[str, Any] = layer_arrays(method, settings, calibration, layer)
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

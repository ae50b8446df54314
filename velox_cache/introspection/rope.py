"""Read a model's rotary embedding into a RopeSpec."""

import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils

from velox_fn.engine.rope import RopeSpec

_BY_FREQUENCIES = (
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)


def rope_of_layer(model: nn.Module, layer: int) -> RopeSpec:
    """The rotary embedding that turns the keys of layer `layer`, an index in `model.layers`.

    What scales keys before they turn (YaRN's and longrope's mscale) is in the cached keys already and not part of it.
    A layer without rotary embedding (`rope = None`, as NoPE layers have) gives one of no dimensions.

    Raises ValueError when the layer has none that can be read, several that differ, or one whose rotation changes as
    the sequence grows (dynamic NTK scaling), so that cached keys were turned by different ones.
    """
    if layer >= len(model.layers):
        raise ValueError(f"the model has {len(model.layers)} layers and none of index {layer}: no rope to read")
    modules = list(model.layers[layer].modules())
    found = {spec for module in modules if (spec := rope_spec_of(module)) is not None}
    if len(found) == 1:
        return found.pop()
    if not found and any(vars(module).get("rope", module) is None for module in modules):
        return RopeSpec(dims=0)
    raise ValueError(
        f"layer {layer} has {len(found) or 'no'} rotary embeddings that can be read, one is needed; leave "
        "renumber=False, or give rope=RopeSpec(dims, base, ...)"
    )


def rope_spec_of(module: nn.Module) -> RopeSpec | None:
    """What a rotary embedding module of mlx or mlx_lm does; None for any other module.

    Raises ValueError for dynamic NTK scaling, whose rotation changes as the sequence grows.
    """
    if isinstance(module, rope_utils.DynamicNTKScalingRoPE):
        raise ValueError(
            "this rotary embedding changes as the sequence grows (dynamic NTK scaling), so cached keys cannot be moved "
            "by one rotation; leave renumber=False"
        )
    if type(module) is nn.RoPE:
        return RopeSpec(module.dims, float(module.base), module.traditional, float(module.scale))
    if isinstance(module, _BY_FREQUENCIES):
        dims = module.dim if isinstance(module, rope_utils.SuScaledRoPE) else module.dims
        freqs = tuple(map(float, np.array(module._freqs)))
        return RopeSpec(dims, traditional=getattr(module, "traditional", False), freqs=freqs)
    return None

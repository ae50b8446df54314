"""Which part of a model this process holds, when the model is spread over several.

mlx_lm spreads a model in two ways. `model.shard(group)` gives each rank an equal, consecutive part of every layer's
heads (tensor parallel); `model.model.pipeline(group)` gives each rank consecutive layers. A KV cache follows: each rank
caches what its own heads and layers produce, and needs the same part of whatever was calibrated for the whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.latents import caches_latents

_MAKES_KEYS = ("k_proj", "kv_b_proj")
_MAKES_QUERIES = ("q_proj", "q_b_proj")  # all that is shared out of latent attention, whose rows every rank holds whole
_SHARDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear)


@dataclass(frozen=True, eq=False)
class ModelShard:
    """A part of a model: some consecutive layers, and of each layer one of several equal parts of its heads."""

    group: mx.distributed.Group | None = None  # the ranks that hold the model together; None: this one holds it all
    first_layer: int = 0  # index, in the whole model's prompt cache, of this one's first entry
    pipelined: bool = False
    head_part: int = 0
    head_parts: int = 1

    def heads(self, n_heads: int) -> slice:
        """This rank's heads of a layer with `n_heads`. Fewer heads than ranks: several ranks hold the same one.

        Raises ValueError when neither number is a multiple of the other.
        """
        if n_heads % self.head_parts and self.head_parts % n_heads:
            raise ValueError(
                f"{n_heads} heads cannot be shared out evenly over {self.head_parts} ranks: mlx_lm would cut a head in "
                f"two; take a number of ranks that divides {n_heads}, or spread the model's layers instead (pipeline)"
            )
        first = self.head_part * n_heads // self.head_parts
        return slice(first, first + max(1, n_heads // self.head_parts))

    def first_head(self, model: nn.Module, n_local: int) -> int:
        """The index, in the whole model, of the first KV head of a layer, from the number of those on this rank."""
        return self.head_part * self.whole_kv_heads(model, n_local) // self.head_parts

    def whole_kv_heads(self, model: nn.Module, n_local: int) -> int:
        """KV heads of a layer in the whole model, from those on this rank."""
        if n_local == 1 and 0 < (declared := _declared_kv_heads(model)) < self.head_parts:
            return declared  # too few to share out, so mlx_lm repeated them
        return n_local * self.head_parts


WHOLE = ModelShard()


def model_shard(model: nn.Module, group: mx.distributed.Group | None = None) -> ModelShard:
    """What this process holds of `model`.

    group: the one that `model.shard` was given. It is found from the model where keys are projected by one of mlx's
    sharded layers, as after mlx_lm's own `shard`; give it for a model that is sharded some other way.

    Raises ValueError when the model's KV heads cannot be shared out over the ranks of the group.
    """
    modules = model.named_modules()
    for _, module in modules:
        if _is_pipeline(module) and module.pipeline_size > 1:
            return ModelShard(mx.distributed.init(), first_layer=module.start_idx, pipelined=True)
    telling = _MAKES_QUERIES if caches_latents(model) else _MAKES_KEYS
    found: Sequence[Any] = [
        module.group for name, module in modules if name.rsplit(".", 1)[-1] in telling and isinstance(module, _SHARDED)
    ]
    group = found[0] if found else group
    if group is None or group.size() == 1:
        return WHOLE
    shard = ModelShard(group, head_part=group.rank(), head_parts=group.size())
    if declared := _declared_kv_heads(model):
        shard.heads(declared)  # refuses what cannot be shared out
    return shard


def _is_pipeline(module: Any) -> bool:
    """Whether a module has mlx_lm's PipelineMixin, or another package's copy of it."""
    return any(cls.__name__ == "PipelineMixin" for cls in type(module).__mro__)


def _declared_kv_heads(model: nn.Module) -> int:
    if caches_latents(model):
        return 1
    declared = (getattr(getattr(module, "args", None), "num_key_value_heads", None) for module in model.modules())
    return next((count for count in declared if isinstance(count, int)), 0)

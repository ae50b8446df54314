"""Budgets that differ from layer to layer, and the cache that such layers get."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.plan import LayerPlan, asks_for_mask_arrays

Budgets = Sequence[int] | Callable[[int], int]

_NO_BATCH = (
    "layers with budgets of their own cannot share a ragged batch: a model builds one mask for all its layers, and "
    "here each layer holds another number of rows; give every layer the same budget, or serve one sequence at a time"
)


class SoloKVCache(EvictingKVCache):
    """An evicting cache whose budget is not that of the other layers, and which therefore cannot be batched.

    `merge` is absent as far as mlx_lm can see, so that its server serves such a model one request at a time and its
    batch generator refuses it.
    """

    @property
    def merge(self) -> NoReturn:
        """Absent. Raises AttributeError that says why."""
        raise AttributeError(_NO_BATCH)

    def extend(self, other: EvictingKVCache) -> None:
        """Raises ValueError: see the class."""
        raise ValueError(_NO_BATCH)

    def prepare(self, **padding: Any) -> None:
        """Raises ValueError for a prefill with padding: see the class."""
        if any(padding.get("right_padding") or ()) or any(padding.get("left_padding") or ()):
            raise ValueError(_NO_BATCH)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """As in EvictingKVCache, but raises ValueError for an array, which would fit this layer only."""
        if return_array and N > 1:
            raise ValueError(_ARRAY_MASK)
        return super().make_mask(N, window_size=window_size)


_ARRAY_MASK = (
    "this model asks for its attention mask as an array, and one array, made for one layer's rows, serves all its "
    "layers; give every layer the same budget"
)


def layer_budgets(model: nn.Module, plan: Sequence[LayerPlan], budgets: Budgets) -> Mapping[int, int]:
    """The budget of each bounded layer, by its index in the prompt cache.

    budgets: one number per entry of the prompt cache (those of unbounded layers are not looked at), or a function of
    the index. Raises ValueError when the list has another length, or when the model wants masks as arrays.
    """
    if asks_for_mask_arrays(model):
        raise ValueError(_ARRAY_MASK)
    if callable(budgets):
        return {entry.layer: budgets(entry.layer) for entry in plan if entry.bounded}
    if len(budgets) != len(plan):
        raise ValueError(
            f"budget has {len(budgets)} entries, but the model has {len(plan)} layers; give one number per layer "
            "(those of layers that are not bounded do not count), or a function of the layer's index"
        )
    return {entry.layer: budgets[entry.layer] for entry in plan if entry.bounded}

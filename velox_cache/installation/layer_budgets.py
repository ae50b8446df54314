"""Budgets that differ from layer to layer, and the cache that such layers get."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.plan import LayerPlan, asks_for_mask_arrays
from velox_fn.engine.rows import View

Budgets = Sequence[int] | Callable[[int], int]

_NO_BATCH = (
    "layers with budgets of their own cannot share a ragged batch on this model: it makes one mask for all its layers, "
    "each of which holds another number of rows, and its attention cannot be given another; give every layer the same "
    "budget, or serve one sequence at a time"
)
# What a batch gives the model for a mask. Attention that is not given the layer's own in its place refuses it by name.
OWN_MASK = "the mask of each layer's own cache, which the tap that install() puts on attention hands over"


class LayerBudgetKVCache(EvictingKVCache):
    """An evicting cache whose budget is not that of the other layers, and which brings a mask of its own to a batch."""

    _mask: mx.array | str | None = None  # of the last view

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """As in EvictingKVCache for one sequence; OWN_MASK for a batch.

        Raises ValueError for an array, which would fit this layer only.
        """
        if return_array and N > 1:
            raise ValueError(_ARRAY_MASK)
        mask = super().make_mask(N, window_size=window_size)
        return OWN_MASK if self._held.rows.batched else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> View:
        """As in EvictingKVCache."""
        mask = super().make_mask(keys.shape[2]) if self._held.rows.batched else None
        view = super().update_and_fetch(keys, values)
        self._mask = mask
        return view

    def own_mask(self, mask: mx.array | str | None) -> mx.array | str | None:
        """The mask for attention over the last view, where the model gives OWN_MASK; any other stays."""
        return self._mask if mask is OWN_MASK else mask


class SoloKVCache(LayerBudgetKVCache):
    """A LayerBudgetKVCache for a model whose attention cannot be given a mask, and which therefore cannot be batched.

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


def takes_own_masks(model: nn.Module, make_caches: Callable[[], list[Any]]) -> bool:
    """Whether each layer's attention gets its own mask in a batch, under a tap, tried without evaluating anything.

    make_caches: fresh prompt caches, of `LayerBudgetKVCache` where a layer is bounded. Not so where attention is done
    by hand, where layers read another layer's rows, or where one of the caches has no batched form.
    """
    try:
        for tokens in ([0, 1], [0]):  # latent attention does one token's by another road
            # Fresh ones for each: a second call would begin to compute the first, which ranks do in their own order.
            pairs = zip(make_caches(), make_caches(), strict=True)
            model(mx.array([tokens, tokens]), cache=[type(one).merge([one, other]) for one, other in pairs])
    except Exception:  # whatever it is: such a model is served one sequence at a time
        return False
    return True

"""Budgets that differ from layer to layer, and the cache that such layers get."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.installation.installed import InstalledCaches
from velox_cache.installation.own_masks import OwnMask, looking_up_masks
from velox_cache.installation.tiers import LayerBudget
from velox_cache.introspection.plan import LayerPlan, asks_for_mask_arrays
from velox_cache.introspection.probing import left_as_it_was

Budgets = Sequence[LayerBudget] | Callable[[int], LayerBudget]

_NO_BATCH = (
    "layers with budgets of their own cannot share a ragged batch on this model: it makes one mask for all its layers, "
    "each of which holds another number of rows, and hands it on where another cannot take its place; give every layer "
    "the same budget, or serve one sequence at a time"
)
_ARRAY_MASK = (
    "this model asks for its attention mask as an array, made for one layer's rows, and does not hand it to its layers "
    "as it is, so that each could take its own; give every layer the same budget"
)


class LayerBudgetKVCache(EvictingKVCache):
    """An evicting cache whose budget is not that of the other layers, and which brings a mask of its own."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """As in EvictingKVCache where the mask fits any number of rows, else an `OwnMask`: an array would fit this
        layer only."""
        if window_size is None and (self._held.rows.batched or (return_array and N > 1)):
            return OwnMask(N, as_array=return_array)
        return super().make_mask(N, return_array, window_size)

    def layer_mask(self, n_tokens: int, *, as_array: bool) -> mx.array | str | None:
        """The mask of this layer for its next tokens."""
        return super().make_mask(n_tokens, as_array)


class SoloKVCache(LayerBudgetKVCache):
    """A LayerBudgetKVCache for a model whose layers do not take masks of their own, and which cannot be batched so.

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


def layer_budgets(plan: Sequence[LayerPlan], budgets: Budgets) -> Mapping[int, LayerBudget]:
    """The budget of each bounded layer, by its index in the prompt cache.

    budgets: one number per entry of the prompt cache (those of unbounded layers are not looked at), or one for each KV
    head of an entry, or a function of the index. Raises ValueError when the list has another length.
    """
    if callable(budgets):
        return {entry.layer: budgets(entry.layer) for entry in plan if entry.bounded}
    if len(budgets) != len(plan):
        raise ValueError(
            f"budget has {len(budgets)} entries, but the model has {len(plan)} layers; give one number per layer "
            "(those of layers that are not bounded do not count), or a function of the layer's index"
        )
    return {entry.layer: budgets[entry.layer] for entry in plan if entry.bounded}


def with_own_masks(model: nn.Module, installed: InstalledCaches) -> InstalledCaches:
    """The same with caches for budgets per layer, whose masks the layers look up.

    Raises ValueError when the model wants masks as arrays and its layers do not take their own.
    """
    own, alone = (replace(installed, cache_class=cls) for cls in (LayerBudgetKVCache, SoloKVCache))
    with looking_up_masks(model):
        if _layers_take_own_masks(model, own, n_sequences=2):
            return own
        if asks_for_mask_arrays(model) and not _layers_take_own_masks(model, alone, n_sequences=1):
            raise ValueError(_ARRAY_MASK)
    return alone


def _layers_take_own_masks(model: nn.Module, make_caches: Callable[[], list[Any]], n_sequences: int) -> bool:
    """Whether each layer's attention gets its own mask, in a batch of so many, tried without evaluating anything.

    Not so where the model's layers are not called as a whole, or in a batch where one of the caches has no batched
    form, or the model itself takes none.
    """
    try:
        for tokens in ([0, 1], [0]):  # latent attention does one token's by another road
            # Fresh ones for each: a second call would begin to compute the first, which ranks do in their own order.
            caches = make_caches()
            if n_sequences > 1:
                caches = [one.merge([one, other]) for one, other in zip(caches, make_caches(), strict=True)]
            with left_as_it_was(model):
                model(mx.array([tokens] * n_sequences), cache=caches)
    except Exception:  # whatever it is: such a model is served one sequence at a time
        return False
    return True

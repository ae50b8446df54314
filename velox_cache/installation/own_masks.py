"""Each layer's own mask, where a model makes one for all its layers and they hold different numbers of rows.

A model asks one of its caches for a mask and hands the answer to every layer. A cache whose rows are not those of the
other layers answers with an `OwnMask`, and each layer's call puts the mask of its own cache in that place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.own_calls import call_as_given, call_by, is_called_by, layers_of
from velox_cache.introspection.query_tap import flat_caches

_GIVEN = "call_with_mask_given"
Mask = mx.array | str | None


class OwnMask(str):
    """Stands for the mask of each layer's own cache, in one call of a model. Attention that gets it refuses it."""

    n_tokens: int
    as_array: bool
    masks: list[tuple[Any, Mask]]  # that layers have looked up, by the cache that they are of

    def __new__(cls, n_tokens: int, *, as_array: bool) -> "OwnMask":
        """For a call of so many tokens. as_array: the model asked for an array."""
        made = super().__new__(cls, "the mask of each layer's own cache, which install() has its layers look up")
        made.n_tokens, made.as_array, made.masks = n_tokens, as_array, []
        return made

    def of(self, arguments: list[Any]) -> Mask:
        """The mask for a layer with these arguments: of the cache among them, or of the one whose view they hold.

        A cache is asked once, before it takes in the tokens; later layers that read its rows get the same mask.
        """
        flat = [part for value in arguments for part in (value if isinstance(value, tuple) else (value,))]
        own = next((one for one in flat_caches(flat) if hasattr(one, "layer_mask")), None)
        for cache, found in self.masks:
            if cache is own or (own is None and any(part is cache.keys_and_values()[0] for part in flat)):
                return found
        if own is None:
            return self
        mask: Mask = own.layer_mask(self.n_tokens, as_array=self.as_array)
        self.masks.append((own, mask))
        return mask


def look_up_masks(model: nn.Module) -> None:
    """Have each layer of `model` take the mask of its own cache in the place of an `OwnMask`."""
    for layer in layers_of(model):
        call_by(layer, _GIVEN, _looking_up)


def take_masks_as_given(model: nn.Module) -> None:
    """Undo `look_up_masks`. Does nothing when it was not called."""
    for layer in layers_of(model):
        call_as_given(layer, _GIVEN)


@contextmanager
def looking_up_masks(model: nn.Module) -> Iterator[None]:
    """`look_up_masks` for the length of a `with`, unless it is done already."""
    before = [is_called_by(layer, _GIVEN) for layer in layers_of(model)]
    look_up_masks(model)
    try:
        yield
    finally:
        if not any(before):
            take_masks_as_given(model)


def _looking_up(given: type[nn.Module]) -> Callable[..., Any]:
    """The call of `given`, with masks looked up."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shared = next((value for value in (*args, *kwargs.values()) if isinstance(value, OwnMask)), None)
        if shared is None:
            return given.__call__(self, *args, **kwargs)
        mask = shared.of([*args, *kwargs.values()])
        args = tuple(mask if value is shared else value for value in args)
        kwargs = {name: mask if value is shared else value for name, value in kwargs.items()}
        return given.__call__(self, *args, **kwargs)

    return call

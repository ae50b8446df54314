"""How many KV heads each of a model's caches holds, and of how many dimensions, as the model fills them."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.cache_kinds import is_plain, parts
from velox_cache.introspection.plan import plain_caches
from velox_cache.introspection.probing import left_as_it_was
from velox_fn.engine.codebooks import ENTRIES
from velox_fn.engine.eviction import Eviction
from velox_fn.methods.fusion import PER_TERM


@dataclass(frozen=True)
class KeyLayout:
    """The keys of one cache."""

    n_kv_heads: int
    head_dim: int


class KeyLayouts:
    """The layouts of a model's full-attention caches, by their index in the prompt cache.

    A cache's index need not be that of the layer that fills it: layers may have none, or several. So the model is
    called on two tokens, when the first layout is asked for, and its result dropped: MLX evaluates nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def of_layer(self, layer: int) -> KeyLayout | None:
        """The layout of entry `layer`; None when it has no plain cache, or the model cannot be called here."""
        return self._found.get(layer)

    @functools.cached_property
    def _found(self) -> Mapping[int, KeyLayout]:
        caches = plain_caches(self._model)
        try:
            with left_as_it_was(self._model):
                self._model(mx.array([[0, 1]]), cache=caches)
        except Exception:  # whatever it is, the caller's own first call says it better
            return {}
        plain = [(layer, part) for layer, entry in enumerate(caches) for part in parts(entry) if is_plain(part)]
        filled = {layer: part.keys for layer, part in plain if part.keys is not None}
        return {layer: KeyLayout(keys.shape[1], keys.shape[3]) for layer, keys in filled.items()}


def check_filter_layout(layouts: KeyLayouts, layer: int, method: Eviction, heads: Sequence[int] | None = None) -> None:
    """ValueError when the method's calibrated arrays cannot fit the layer's heads, as far as the model tells them.

    heads: those that the method is for; None, all.
    """
    layout = layouts.of_layer(layer) if method.params else None
    if layout is None:
        return
    n_heads = layout.n_kv_heads if heads is None else len(heads)
    for name, array in method.params.items():
        of_rows = name not in (*PER_TERM, *ENTRIES) and array.ndim < 4  # others are of terms, entries, rotary pairs
        dims = array.shape[1:2] if of_rows else ()
        if array.shape[0] != n_heads or any(dim != layout.head_dim for dim in dims):
            raise ValueError(
                f"layer {layer} has {n_heads} KV heads of dimension {layout.head_dim}, but its {name} have "
                f"shape {tuple(array.shape)}; they belong to another model, calibrate this one"
            )

"""Read a model's rotary embedding into a RopeSpec, and see that it does to keys what the model does."""

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils

from velox_cache.introspection.cache_kinds import is_list, is_plain, with_parts
from velox_cache.introspection.plan import plain_caches
from velox_cache.introspection.probing import left_as_it_was
from velox_cache.introspection.query_tap import flat_caches
from velox_fn.engine.rope import RopeSpec, rope_remap_positions

_PROBED = mx.array([[0], [1]])  # tokens, each a sequence of its own
_FAR = 1000  # far enough for slow pairs to turn, near enough for float32 angles


class ModelRopes:
    """The rotary embeddings of a model's full-attention layers.

    Which one turns a layer's keys, which of their dimensions, and whether anything is done to the keys afterwards, is
    decided by the keys that the model itself makes of one token at two positions. The model runs for that, twice on two
    tokens, when the first layer is asked for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def of_layer(self, layer: int) -> RopeSpec:
        """The rotation that takes the keys of layer `layer`, an index in the prompt cache, from position to position.

        What scales keys before they turn (YaRN's and longrope's mscale) is in the cached keys already and not part of
        it. Keys that the model does not turn, as those of NoPE layers, give a rotation of no dimensions.

        Raises ValueError when the layer has no plain KV cache, when no rotary embedding that can be read does to its
        keys what the model does, when positions may be other than token indices, or when the rotation changes as the
        sequence grows (dynamic NTK scaling), so that cached keys were turned by different ones.
        """
        if layer not in self._rows:
            raise ValueError(f"layer {layer} of this model has no plain KV cache: no rope to read")
        (here, there), values = self._rows[layer]
        if _same(here, there) and not _same(*values):
            raise ValueError(
                f"layer {layer} caches what turns with the position in the place of the value, as latent attention "
                "does, and renumbering turns keys; leave renumber=False"
            )
        for spec in _placed(self._specs, here.shape[-1]):
            if _same(rope_remap_positions(here, mx.array(0), mx.array(self._far), spec), there):
                return spec
        raise ValueError(
            f"layer {layer} has no rotary embedding that can be read and takes its keys from one position to another "
            f"as the model does: {self._specs or 'none'} was found, and tried on leading and on trailing dimensions; "
            "leave renumber=False, or give rope=RopeSpec(dims, base, ...)"
        )

    def if_known(self, layer: int) -> RopeSpec | None:
        """`of_layer`, or None where it raises and where no dimension turns."""
        try:
            spec = self.of_layer(layer)
        except ValueError:
            return None
        return spec if spec.dims else None

    @functools.cached_property
    def _specs(self) -> tuple[RopeSpec, ...]:
        return tuple(dict.fromkeys(spec for module in self._model.modules() for spec in rope_specs_of(module)))

    @functools.cached_property
    def _rows(self) -> dict[int, tuple[tuple[mx.array, mx.array], tuple[mx.array, mx.array]]]:
        """Of each layer, keys [2,H,1,D] and values [2,H,1,D_v], each at positions 0 and `_far`."""
        for module in self._model.modules():
            if _takes_positions(type(module)):
                raise ValueError(
                    f"{type(module).__name__} takes position_ids: rotary positions of this model need not be token "
                    "indices (those of an image's tokens are not), so rows cannot be moved by counting tokens; leave "
                    "renumber=False"
                )
        here, there = (self._rows_at(position) for position in (0, self._far))
        pairs = {layer: zip(rows, there[layer], strict=True) for layer, rows in here.items()}
        return {layer: (keys, values) for layer, (keys, values) in pairs.items()}

    @property
    def _far(self) -> int:
        """A position that the model knows: past the end of a table of positions mlx reads whatever stands there."""
        n_positions = getattr(getattr(self._model, "args", None), "n_positions", None)
        return min(_FAR, n_positions - 1) if isinstance(n_positions, int) else _FAR

    def _rows_at(self, position: int) -> dict[int, tuple[mx.array, mx.array]]:
        own = plain_caches(self._model)
        plain = {layer: cache for layer, entry in enumerate(own) for cache in flat_caches([entry]) if is_plain(cache)}
        with left_as_it_was(self._model):
            logits = self._model(_PROBED, cache=[_at(position, cache) for cache in own])
        rows = {layer: (cache.keys, cache.values) for layer, cache in plain.items() if cache.keys is not None}
        mx.eval(getattr(logits, "logits", logits), rows)  # the logits too: ranks that share a model wait for each other
        return rows


def rope_specs_of(module: nn.Module) -> tuple[RopeSpec, ...]:
    """What a module may do to leading dimensions if it is a rotary embedding; nothing for any other module.

    A module that holds frequencies need not say which dimensions it pairs.
    Raises ValueError for dynamic NTK scaling, whose rotation changes as the sequence grows.
    """
    if isinstance(module, rope_utils.DynamicNTKScalingRoPE):
        raise ValueError(
            "this rotary embedding changes as the sequence grows (dynamic NTK scaling), so cached keys cannot be moved "
            "by one rotation; leave renumber=False"
        )
    if type(module) is nn.RoPE:
        return (RopeSpec(module.dims, float(module.base), module.traditional, float(module.scale)),)
    freqs = getattr(module, "_freqs", None)
    if not isinstance(freqs, mx.array) or freqs.ndim != 1 or not mx.all(freqs > 0).item():
        return ()
    pairs = tuple(map(float, np.array(freqs)))
    pairings = [module.traditional] if hasattr(module, "traditional") else [False, True]
    return tuple(RopeSpec(2 * len(pairs), traditional=pairing, freqs=pairs) for pairing in pairings)


class _Standing:
    """Added to a cache's class: its next token stands at `offset`, with nothing before it that attention would see."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        return None


def _standing(cls: type) -> type:
    return type(f"Standing{cls.__name__}", (_Standing, cls), {})


def _at(position: int, cache: Any) -> Any:
    """`cache`, or those in it, standing at `position`: sliding ones too, for some models ask only the first."""
    if is_list(cache):
        return with_parts(cache, lambda part: _at(position, part))
    if "offset" in vars(cache):
        cache.__class__, cache.offset = _standing(type(cache)), position
        if hasattr(cache, "start_position"):  # of a chunk
            cache.start_position = position
    return cache


def _takes_positions(cls: type) -> bool:
    call = cls.__call__
    return inspect.isfunction(call) and "position_ids" in inspect.signature(call).parameters


def _placed(specs: tuple[RopeSpec, ...], head_dim: int) -> Iterator[RopeSpec]:
    """No rotation, and each of `specs` on leading and on trailing dimensions of a key."""
    yield RopeSpec(dims=0)
    for spec in specs:
        if spec.dims <= head_dim:
            yield from dict.fromkeys((spec, replace(spec, first=head_dim - spec.dims)))


def _same(turned: mx.array, keys: mx.array) -> bool:
    """Whether two turns of a key agree, as far as the dtype goes."""
    tolerance = 1e-3 if keys.dtype == mx.float32 else 2e-2
    apart, size = (mx.linalg.norm(x.astype(mx.float32), axis=-1) for x in (turned - keys, keys))
    return bool(mx.all(apart <= tolerance * size).item())

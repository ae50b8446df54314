"""In every architecture, keys turned to another position are those that the model's own layers make there."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache
from tiny_models import LATENT_TWICE, RUNNING, model_of

from velox_cache.introspection.plan import plain_caches, plan_layers
from velox_cache.introspection.query_tap import flat_caches
from velox_cache.introspection.rope import ModelRopes
from velox_fn.engine.rope import rope_remap_positions

TOKENS = [5, 3, 60, 7, 7, 11]  # fewer than any window or chunk: a plain cache stands for every kind
MOVED_BY = 200
REFUSED = {
    "gpt2": "positions that are added to the hidden state",
    "gpt_bigcode": "positions that are added to the hidden state",
    "hunyuan_v1_dense": "norms with weights of their own after the rotation",
    "nanochat": "pairs that turn backwards",
    "talkie": "pairs that turn backwards",
}
VALUES_TURN = (
    "bailing_hybrid",
    "bailing_moe_v3",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k25",
    "kimi_vl",
    "mistral4",
    *LATENT_TWICE,
)
ALONE = ("ministral3",)  # queries grow with the position: only a token that sees itself alone is the same everywhere
ON_TRAILING_DIMENSIONS = ("deepseek_v2", "minicpm3", "youtu_llm")


class Moved(KVCache):
    """A cache that tells the model positions further on than its rows."""

    start_position = 0

    def __init__(self, by: int) -> None:
        self.by, self.rows = by, 0
        super().__init__()

    @property
    def offset(self) -> int:
        return self.rows + self.by

    @offset.setter
    def offset(self, offset: int) -> None:
        self.rows = offset - self.by if offset else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values, self.rows = keys, values, keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def maybe_trim_front(self) -> None:
        """Chunks are longer than what this holds."""

    def make_mask(self, N: int, return_array: bool = False, **kwargs: object) -> mx.array | str | None:
        return create_causal_mask(N) if return_array else "causal"


def moved_caches(model: nn.Module, by: int) -> list[object]:
    """The model's caches, those with positions in place of `Moved` ones."""
    caches = plain_caches(model)
    for i, cache in enumerate(caches):
        if hasattr(cache, "caches"):
            cache.caches = tuple(Moved(by) if "offset" in vars(part) else part for part in cache.caches)
        elif "offset" in vars(cache):
            caches[i] = Moved(by)
            caches[i].start_position = by
    return caches


def keys_at(model: nn.Module, layers: list[int], by: int, tokens: list[int]) -> dict[int, mx.array]:
    caches = moved_caches(model, by)
    mx.eval(model(mx.array([tokens]), cache=caches))
    found = {layer: [part for part in flat_caches([caches[layer]]) if isinstance(part, Moved)] for layer in layers}
    return {layer: part.keys for layer, [part] in found.items() if part.keys is not None}


def bounded_layers(model: nn.Module) -> list[int]:
    return [entry.layer for entry in plan_layers(model) if entry.bounded]


@pytest.mark.parametrize("architecture", [name for name in RUNNING if name not in (*REFUSED, *VALUES_TURN)])
def test_turned_keys_are_those_that_the_model_makes_there(architecture: str) -> None:
    model = model_of(architecture)
    tokens = TOKENS[:1] if architecture in ALONE else TOKENS
    if not (layers := bounded_layers(model)):
        return  # none of its keys is ever turned
    ropes = ModelRopes(model)
    here, there = (keys_at(model, layers, by, tokens) for by in (0, MOVED_BY))
    places = mx.arange(len(tokens))
    for layer, keys in here.items():
        turned = rope_remap_positions(keys, places, places + MOVED_BY, ropes.of_layer(layer))
        size = np.abs(np.array(keys)).max()
        np.testing.assert_allclose(np.array(turned) / size, np.array(there[layer]) / size, atol=1e-3)


@pytest.mark.parametrize("architecture", REFUSED)
def test_keys_that_no_rotation_moves_are_refused(architecture: str) -> None:
    model = model_of(architecture)
    with pytest.raises(ValueError, match="as the model does"):
        ModelRopes(model).of_layer(bounded_layers(model)[0])


@pytest.mark.parametrize("architecture", VALUES_TURN)
def test_rotary_parts_that_stand_in_the_place_of_values_are_refused(architecture: str) -> None:
    model = model_of(architecture)
    with pytest.raises(ValueError, match="in the place of the value"):
        ModelRopes(model).of_layer(bounded_layers(model)[0])


@pytest.mark.parametrize("architecture", ON_TRAILING_DIMENSIONS)
def test_the_dimensions_that_turn_may_be_the_last(architecture: str) -> None:
    model = model_of(architecture)
    spec = ModelRopes(model).of_layer(0)
    [keys] = keys_at(model, [0], 0, TOKENS).values()
    assert spec.first > 0
    assert spec.first + spec.dims == keys.shape[-1]

"""A model's rotary embedding, read from its layers."""

import mlx.nn as nn
import pytest

from velox_cache.introspection.rope import ModelRopes
from velox_fn import RopeSpec


@pytest.mark.parametrize(
    ("model_type", "changes", "spec"),
    [
        ("llama", {}, RopeSpec(8, base=1000.0)),
        ("llama", {"rope_traditional": True}, RopeSpec(8, base=1000.0, traditional=True)),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeSpec(8, base=1000.0, scale=0.25)),
        ("qwen3", {"rope_theta": 5000.0}, RopeSpec(8, base=5000.0)),
        ("stablelm", {}, RopeSpec(4, base=1000.0)),
    ],
)
def test_rope_is_that_of_the_attention(tiny_model, model_type, changes, spec):
    assert ModelRopes(tiny_model(model_type, **changes)).of_layer(1) == spec


def test_llama3_scaling_is_read_as_frequencies(tiny_model):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    freqs = ModelRopes(tiny_model("llama", rope_scaling=scaling)).of_layer(0).freqs
    # The fastest pair keeps its pace, the slowest is slowed by the factor.
    assert freqs[0] == pytest.approx(1.0)
    assert freqs[-1] == pytest.approx(8 * 1000.0 ** (3 / 4), rel=1e-4)


def test_layers_have_their_own_rope(tiny_model):
    model = tiny_model("gemma3_text", rope_local_base_freq=10.0)
    assert ModelRopes(model).of_layer(1).base == 1000.0
    with pytest.raises(ValueError, match="layer 0 of this model has no plain KV cache"):
        ModelRopes(model).of_layer(0)


class AsItCame(nn.Module):
    """Turns nothing, as in NoPE layers."""

    def __call__(self, x, offset=0):
        return x


class Growing(nn.Module):
    """Does with the position what no rotation does."""

    def __call__(self, x, offset=0):
        return x * (1 + offset)


def test_layer_without_rope_turns_nothing(tiny_model):
    model = tiny_model()
    model.layers[1].self_attn.rope = AsItCame()
    assert ModelRopes(model).of_layer(1) == RopeSpec(dims=0)


def test_rotation_that_changes_with_the_length_is_refused(tiny_model):
    model = tiny_model("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="changes as the sequence grows"):
        ModelRopes(model).of_layer(0)


def test_rope_of_an_unknown_kind_is_refused(tiny_model):
    model = tiny_model()
    model.layers[0].self_attn.rope = Growing()
    with pytest.raises(ValueError, match="layer 0 has no rotary embedding that can be read"):
        ModelRopes(model).of_layer(0)


def test_layer_that_is_not_there_is_refused(tiny_model):
    with pytest.raises(ValueError, match="layer 2 of this model has no plain KV cache"):
        ModelRopes(tiny_model()).of_layer(2)


def test_positions_that_need_not_be_token_indices_are_refused(tiny_model):
    model = tiny_model()
    model.layers[1].self_attn = TakesPositions()
    with pytest.raises(ValueError, match="TakesPositions takes position_ids"):
        ModelRopes(model).of_layer(0)


class TakesPositions(nn.Module):
    def __call__(self, x, mask=None, cache=None, position_ids=None):
        raise NotImplementedError

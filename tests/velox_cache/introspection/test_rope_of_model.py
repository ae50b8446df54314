"""A model's rotary embedding, read from its layers."""

import mlx.nn as nn
import pytest

from velox_cache.introspection.rope import rope_of_layer
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
    assert rope_of_layer(tiny_model(model_type, **changes), 1) == spec


def test_llama3_scaling_is_read_as_frequencies(tiny_model):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    freqs = rope_of_layer(tiny_model("llama", rope_scaling=scaling), 0).freqs
    # The fastest pair keeps its pace, the slowest is slowed by the factor.
    assert freqs[0] == pytest.approx(1.0)
    assert freqs[-1] == pytest.approx(8 * 1000.0 ** (3 / 4), rel=1e-4)


def test_layers_have_their_own_rope(tiny_model):
    model = tiny_model("gemma3_text", rope_local_base_freq=10.0)
    assert [rope_of_layer(model, layer).base for layer in (0, 1)] == [10.0, 1000.0]


def test_layer_without_rope_turns_nothing(tiny_model):
    model = tiny_model()
    model.layers[1].self_attn.rope = None
    assert rope_of_layer(model, 1) == RopeSpec(dims=0)


def test_rotation_that_changes_with_the_length_is_refused(tiny_model):
    model = tiny_model("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="changes as the sequence grows"):
        rope_of_layer(model, 0)


def test_rope_of_an_unknown_kind_is_refused(tiny_model):
    model = tiny_model()
    model.layers[0].self_attn.rope = nn.Identity()
    with pytest.raises(ValueError, match="layer 0 has no rotary embeddings"):
        rope_of_layer(model, 0)


def test_layer_that_is_not_there_is_refused(tiny_model):
    with pytest.raises(ValueError, match="none of index 2"):
        rope_of_layer(tiny_model(), 2)

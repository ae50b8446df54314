"""Weights are told apart by their numbers, whatever the model is called; what a row takes is seen without computing."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.utils import linear_to_lora_layers

from velox_cache.introspection.row_bytes import row_bytes
from velox_cache.introspection.weights_digest import weights_digest


def test_the_same_weights_have_the_same_digest(tiny_model):
    assert weights_digest(tiny_model()) == weights_digest(tiny_model())


def test_installing_caches_changes_no_weight(tiny_model):
    from velox_cache import install

    model = tiny_model()
    before = weights_digest(model)
    install(model, "l2norm", budget=16, interval=4)
    assert weights_digest(model) == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_hidden_layers": 3}], ids=str)
def test_other_weights_have_another(tiny_model, change):
    assert weights_digest(tiny_model()) != weights_digest(tiny_model(**change))


def test_an_adapter_is_left_out(tiny_model):
    model = tiny_model()
    before = weights_digest(model)
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    assert any("lora_a" in name for name, _ in tree_flatten(model.parameters()))
    assert weights_digest(model) == before


def test_another_precision_has_another(tiny_model):
    model = tiny_model()
    before = weights_digest(model)
    model.update(tree_map(lambda array: array.astype(mx.float16), model.parameters()))
    assert weights_digest(model) != before


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_the_bytes_of_a_row_are_those_that_a_run_leaves(tiny_model, model_type):
    model = tiny_model(model_type)
    caches = model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
    model(mx.array([list(range(10))]), cache=caches)
    mx.eval([cache.state for cache in caches])
    expected = tuple(
        sum(array[:, :, :10].nbytes for array in (cache.keys, cache.values)) // 10 if type(cache) is KVCache else 0
        for cache in caches
    )
    assert row_bytes(model) == expected
    assert any(expected)


def test_a_model_that_cannot_be_called_tells_nothing(tiny_model):
    model = tiny_model()
    del model.model.layers[0].self_attn.q_proj
    assert row_bytes(model) == (None, None)

"""The keys of each cache, read from what the model fills it with."""

import mlx.core as mx
import pytest
from tiny_models import RUNNING, model_of

import velox_cache as vc
from velox_cache.introspection.cache_kinds import is_plain
from velox_cache.introspection.key_layouts import KeyLayout, KeyLayouts
from velox_cache.introspection.plan import plain_caches, plan_layers


@pytest.mark.parametrize("architecture", RUNNING)
def test_layouts_are_those_of_the_keys_that_fill_the_caches(architecture: str) -> None:
    model = model_of(architecture)
    layouts, caches = KeyLayouts(model), plain_caches(model)
    model(mx.array([[3, 1, 4, 1]]), cache=caches)
    for layer, cache in enumerate(caches):
        if is_plain(cache) and cache.keys is not None:
            _, n_kv_heads, _, head_dim = cache.keys.shape
            assert layouts.of_layer(layer) == KeyLayout(n_kv_heads, head_dim)


@pytest.mark.parametrize("architecture", ["nemotron-nas", "nemotron_h"])
def test_filters_fit_the_cache_and_not_the_layer_of_its_index(architecture: str) -> None:
    """A cache's index is not that of its layer where layers have none."""
    model = model_of(architecture)
    layouts = KeyLayouts(model)
    found = [layouts.of_layer(entry.layer) for entry in plan_layers(model)]
    filters = [None if one is None else mx.ones((one.n_kv_heads, one.head_dim)) for one in found]
    vc.install(model, "qfilters", budget=24, calibration=vc.Calibration(filters))
    vc.uninstall(model)
    wrong = [None if one is None else mx.ones((one.n_kv_heads + 1, one.head_dim)) for one in found]
    with pytest.raises(ValueError, match="belong to another model"):
        vc.install(model, "qfilters", budget=24, calibration=vc.Calibration(wrong))


def test_a_model_that_cannot_be_called_here_tells_nothing() -> None:
    assert KeyLayouts(model_of("olmo")).of_layer(0) is None


def test_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(mx, "eval", lambda *arrays: pytest.fail("evaluated"))
    assert KeyLayouts(model).of_layer(1) == KeyLayout(2, 8)

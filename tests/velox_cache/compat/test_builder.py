"""KVCacheBuilder: one cache per layer from a config, with the layer's filters."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from velox_cache import (
    Calibration,
    CurDKVKVCache,
    EvictingKVCache,
    KVCacheBuilder,
    KVCacheConfig,
    QFiltersKVCache,
)

H, D = 2, 8


def calibration(n_layers=2, heads=H, dim=D):
    return Calibration([mx.eye(max(heads, dim))[:heads, :dim]] * n_layers, model_id="tiny")


def test_one_cache_per_layer_with_the_settings_of_the_config(tiny_model):
    caches = KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(qfilters_budget=16))
    assert [(type(cache), cache.method.settings["budget"]) for cache in caches] == [(QFiltersKVCache, 16)] * 2


def test_caches_count_bytes_under_the_names_of_the_documents(tiny_model):
    model = tiny_model()
    for method, named in (("qfilters", QFiltersKVCache), ("curdkv", CurDKVKVCache)):
        config = KVCacheConfig(method=method, qfilters_budget=16, qfilters_calib_tokens=8, curdkv_budget=16)
        built = KVCacheBuilder.for_model(model, config)
        model(mx.array([list(range(1, 31))]), cache=built)
        keys = mx.zeros((1, H, 30, D))
        alone = named(config)
        alone.update_and_fetch(keys, keys)
        rows = 16 * H * 2 * D * 4
        kept = {"qfilters": rows + H * D * 4, "curdkv": rows}[method]
        for cache in (built[0], alone):
            assert getattr(cache, f"{method}_kept_bytes") == kept
            assert cache.compression_ratio == cache.full_seq_bytes / kept


def test_other_methods_have_plain_adapters(tiny_model):
    built = KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(method="h2o", h2o_budget=32))
    assert [type(cache) for cache in built] == [EvictingKVCache] * 2


def test_caches_are_fresh_at_each_call(tiny_model):
    model, config = tiny_model(), KVCacheConfig(qfilters_budget=16)
    first, second = (KVCacheBuilder.for_model(model, config) for _ in range(2))
    model(mx.array([[1, 2, 3]]), cache=first)
    assert all(cache.empty() for cache in second)


def test_a_calibration_reaches_the_caches_layer_by_layer(tiny_model):
    drawn = [mx.array(np.random.default_rng(i).standard_normal((H, D)).astype(np.float32)) for i in range(2)]
    filters = [layer / mx.linalg.norm(layer, axis=-1, keepdims=True) for layer in drawn]
    caches = KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(), Calibration(filters, model_id="tiny"))
    for cache, layer in zip(caches, filters, strict=True):
        np.testing.assert_array_equal(np.array(cache.method.params["filters"]), np.array(layer))


def test_layers_that_cannot_be_bounded_keep_their_own_caches(tiny_model):
    caches = KVCacheBuilder.for_model(tiny_model("gemma3_text"), KVCacheConfig(qfilters_budget=16))
    assert [type(cache) for cache in caches] == [RotatingKVCache, QFiltersKVCache]


def test_head_dim_is_checked_against_the_model(tiny_model):
    assert KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(head_dim=D))
    with pytest.raises(ValueError, match=r"head_dim=128 does not fit.*8 dimensions"):
        KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(head_dim=128))


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (calibration(heads=3), r"2 KV heads of dimension 8.*\(3, 8\)"),
        (calibration(dim=4), r"2 KV heads of dimension 8.*\(2, 4\)"),
        (calibration(n_layers=1), "covers 1 layers, but the model has 2"),
        (calibration(n_layers=3), "covers 3 layers, but the model has 2"),
    ],
    ids=["heads", "dim", "fewer layers", "more layers"],
)
def test_layout_mismatch_raises_when_the_caches_are_built(tiny_model, filters, message):
    with pytest.raises(ValueError, match=message):
        KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(), filters)

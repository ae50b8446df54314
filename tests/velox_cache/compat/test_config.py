"""KVCacheConfig: the documents' names and defaults, checked at construction."""

import dataclasses
from importlib import import_module

import pytest
from calibrated import random_calibration

from metal_src import metal_available
from velox_cache import KVCacheBuilder, KVCacheConfig, QFiltersKVCache
from velox_cache.compat.config import PREFIXES


def test_defaults_are_those_of_the_seeds():
    config = KVCacheConfig()
    assert (config.method, config.head_dim) == ("qfilters", None)
    assert config.settings() == {"budget": 512, "n_sink": 4, "recent": 0, "calib_tokens": 128, "sign": 1}


@pytest.mark.parametrize("method", PREFIXES)
def test_every_method_can_be_configured(method):
    assert KVCacheConfig(method=method).eviction().name == method


@pytest.mark.parametrize("method", PREFIXES)
def test_every_method_has_its_budget_here(method):
    assert "budget" in KVCacheConfig(method=method).settings()


def test_settings_reach_the_method():
    config = KVCacheConfig(
        qfilters_budget=64, qfilters_n_sink=2, qfilters_recent=8, qfilters_calib_tokens=32, qfilters_sign=-1
    )
    assert config.eviction().settings | {"rollback": 0} == {
        "budget": 64,
        "n_sink": 2,
        "recent": 8,
        "rollback": 0,
        "calib_tokens": 32,
        "sign": -1,
        "interval": 1,
        "pinned": [],
    }


def test_fields_of_other_methods_are_not_looked_at():
    assert KVCacheConfig(method="l2norm", qfilters_budget=-1).eviction().settings["budget"] == 512


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "qfilter"}, "there is no method 'qfilter'"),
        ({"qfilters_budget": 0}, "budget must be at least 1, got 0"),
        ({"qfilters_budget": -4}, "budget must be at least 1, got -4"),
        ({"qfilters_budget": 2.5}, "budget must be a whole number, got 2.5"),
        ({"qfilters_n_sink": -1}, "n_sink must be at least 0"),
        ({"qfilters_recent": -1}, "recent must be at least 0"),
        ({"qfilters_n_sink": 100, "qfilters_recent": 412}, "must be smaller than budget"),
        ({"qfilters_sign": 0}, "sign must be one of 1, -1"),
        ({"qfilters_calib_tokens": 1}, "calib_tokens must be at least 2"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_construction(fields, message):
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(**fields)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVCacheConfig().qfilters_budget = 3


@pytest.mark.skipif(metal_available(), reason="asks for what is not here")
@pytest.mark.parametrize("make", [KVCacheConfig, lambda **given: QFiltersKVCache(KVCacheConfig(), **given)])
def test_metal_that_is_asked_for_and_missing_is_refused(make):
    assert make(use_metal_kernels=False)
    with pytest.raises(ValueError, match="needs MLX on an Apple GPU"):
        make(use_metal_kernels=True)


def test_metal_is_refused_for_a_method_that_has_no_kernels():
    assert KVCacheConfig(method="h2o", use_metal_kernels=False).eviction().name == "h2o"
    with pytest.raises(ValueError, match="h2o has no Metal kernels"):
        KVCacheConfig(method="h2o", use_metal_kernels=True)


@pytest.mark.parametrize("method", ["keydiff", "expected_attention"])
def test_metal_that_waits_for_calibrated_arrays_is_judged_with_the_model(method, tiny_model, monkeypatch):
    monkeypatch.setattr(import_module("velox_fn.engine.fused_evict"), "metal_available", lambda: True)
    monkeypatch.setattr(import_module("velox_fn.engine.fused_evict"), "kernel_failure", lambda: None)
    model, config = tiny_model(), KVCacheConfig(method=method, use_metal_kernels=True)
    caches = KVCacheBuilder.for_model(model, config, random_calibration())
    assert caches[0].method.init(1, 2, 8).store.metal
    with pytest.raises(ValueError, match="use_metal_kernels=True needs"):
        KVCacheBuilder.for_model(model, config)

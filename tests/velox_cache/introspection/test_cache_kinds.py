"""Caches are told by their form: packages carry copies of mlx_lm's classes under the same names."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from velox_cache import EvictingKVCache, calibrate, install
from velox_cache.harness.memory import cache_usage

PROMPT = [(11 * i) % 97 for i in range(60)]
TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 2


@pytest.fixture
def other_package() -> types.ModuleType:
    """Another package's copy of mlx_lm's caches: the same code, other classes."""
    module = types.ModuleType("other_vlm.models.cache")
    module.__package__ = mlx_lm_cache.__package__  # for its relative imports
    exec(inspect.getsource(mlx_lm_cache), vars(module))
    return module


def model_that_makes(model: nn.Module, make: Callable[[], Any]) -> nn.Module:
    """A model whose class makes these caches."""
    made = type("Model", (type(model),), {"make_cache": lambda self: [make() for _ in self.layers]})
    model.__class__ = made
    return model


def logits_of(model: nn.Module, caches: list[Any]) -> np.ndarray:
    return np.array(model(mx.array([PROMPT]), cache=caches))


def test_copy_of_the_plain_class_is_bounded(
    tiny_model: Callable[..., nn.Module], other_package: types.ModuleType
) -> None:
    assert other_package.KVCache is not mlx_lm_cache.KVCache
    model = model_that_makes(tiny_model(), other_package.KVCache)
    plain = logits_of(model, model.make_cache())
    install(model, "h2o", budget=32)
    caches = model.make_cache()
    np.testing.assert_array_equal(logits_of(model, caches), plain)
    assert [(type(cache), cache.size()) for cache in caches] == [(EvictingKVCache, 32)] * 2


def test_copy_is_bounded_inside_a_copy_of_the_list(
    tiny_model: Callable[..., nn.Module], other_package: types.ModuleType
) -> None:
    def make() -> Any:
        return other_package.CacheList(other_package.ArraysCache(1), other_package.KVCache())

    model = model_that_makes(tiny_model(), make)
    report = install(model, "l2norm", budget=16)
    assert [(entry.cache, entry.bounded) for entry in report.layers] == [("CacheList(ArraysCache, KVCache)", True)] * 2
    [caches, _] = model.make_cache()
    assert type(caches) is other_package.CacheList
    assert [type(part) for part in caches.caches] == [other_package.ArraysCache, EvictingKVCache]


def test_two_copies_in_one_list_are_refused_as_two_plain_ones_are(
    tiny_model: Callable[..., nn.Module], other_package: types.ModuleType
) -> None:
    model = model_that_makes(
        tiny_model(), lambda: other_package.CacheList(other_package.KVCache(), other_package.KVCache())
    )
    with pytest.raises(ValueError, match="rows mirror each other"):
        install(model, "l2norm", budget=16)


def test_model_with_copies_is_calibrated_and_counted(
    tiny_model: Callable[..., nn.Module], tokenizer: Any, other_package: types.ModuleType
) -> None:
    model = model_that_makes(tiny_model(), other_package.KVCache)
    calibration = calibrate(model, tokenizer, [TEXT], progress=False)
    own = calibrate(tiny_model(), tokenizer, [TEXT], progress=False)
    for found, expected in zip(calibration.filters, own.filters, strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(expected))
    caches = model.make_cache()
    logits_of(model, caches)
    assert cache_usage(caches).rows_kept == len(PROMPT)


def test_sliding_window_of_another_package_is_left_alone(
    tiny_model: Callable[..., nn.Module], other_package: types.ModuleType
) -> None:
    model = model_that_makes(tiny_model(), lambda: other_package.RotatingKVCache(max_size=8))
    with pytest.raises(ValueError, match="a sliding window bounds itself"):
        install(model, "l2norm", budget=16)


def with_a_window(package: types.ModuleType) -> type:
    def init(self: Any) -> None:
        package._BaseCache.__init__(self)
        self.keys, self.values, self.offset, self.window = None, None, 0, 8

    return type("KVCache", (package.KVCache,), {"__init__": init, "__module__": package.__name__})


def with_another_protocol(package: types.ModuleType) -> type:
    def init(self: Any) -> None:
        self.keys, self.values, self.offset = None, None, 0

    return type("KVCache", (), {"__init__": init, "__module__": package.__name__})


@pytest.mark.parametrize("unlike", [with_a_window, with_another_protocol])
def test_namesake_of_another_form_is_named_with_its_module_and_the_remedy(
    tiny_model: Callable[..., nn.Module], other_package: types.ModuleType, unlike: Callable[[types.ModuleType], type]
) -> None:
    model = model_that_makes(tiny_model(), unlike(other_package))
    with pytest.raises(ValueError, match=r"other_vlm\.models\.cache\.KVCache is not .* make_cache return mlx_lm"):
        install(model, "l2norm", budget=16)

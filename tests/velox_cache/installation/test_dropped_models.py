"""A model that is dropped is freed at once, by its reference count, whatever was installed on it."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest
from calibrated import needed_calibration
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from velox_cache import KVCacheBuilder, KVCacheConfig, calibrate, install, uninstall

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 2


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def nothing(model: nn.Module) -> None:
    pass


def static(model: nn.Module) -> None:
    install(model, "l2norm", budget=16)


def tapped(model: nn.Module) -> None:
    install(model, "h2o", budget=32)


def own_budgets(model: nn.Module) -> None:
    install(model, "l2norm", budget=[16, 24])


def replaced(model: nn.Module) -> None:
    tapped(model)
    tapped(model)


def uninstalled(model: nn.Module) -> None:
    tapped(model)
    uninstall(model)


def refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="budget"):
        install(model, "l2norm", budget=0)


def used(model: nn.Module) -> None:
    tapped(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))


def asked_for_less(model: nn.Module) -> None:
    static(model)
    with pytest.warns(UserWarning, match="max_kv_size=8"):
        make_prompt_cache(model, max_kv_size=8)


def built(model: nn.Module) -> None:
    KVCacheBuilder.for_model(model, KVCacheConfig(method="fusion"), needed_calibration("fusion"))


@pytest.mark.parametrize(
    "use",
    [nothing, static, tapped, own_budgets, replaced, uninstalled, refused, used, asked_for_less, built],
    ids=lambda use: use.__name__,
)
def test_dropped_model_is_freed_without_the_collector(
    tiny_model: Callable[..., nn.Module], no_collector: None, use: Callable[[nn.Module], None]
) -> None:
    model = tiny_model()
    use(model)
    alive = weakref.ref(model)
    del model
    assert alive() is None


def test_calibrated_model_is_freed_without_the_collector(
    tiny_model: Callable[..., nn.Module], tokenizer: object, no_collector: None
) -> None:
    model = tiny_model()
    install(model, "qfilters", budget=16, calibration=calibrate(model, tokenizer, [TEXT], progress=False))
    alive = weakref.ref(model)
    del model
    assert alive() is None


def test_caches_outlive_their_model(tiny_model: Callable[..., nn.Module], no_collector: None) -> None:
    model = tiny_model()
    tapped(model)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert [cache.size() for cache in caches] == [3, 3]


def test_tap_goes_with_its_model_at_once(tiny_model: Callable[..., nn.Module], no_collector: None) -> None:
    original = llama.scaled_dot_product_attention
    model = tiny_model("llama")
    tapped(model)
    assert llama.scaled_dot_product_attention is not original
    del model
    assert llama.scaled_dot_product_attention is original


def test_copy_of_a_model_makes_caches_for_itself(tiny_model: Callable[..., nn.Module], no_collector: None) -> None:
    original = llama.scaled_dot_product_attention
    model = tiny_model("llama")
    tapped(model)
    twin = copy.deepcopy(model)
    del model
    caches = make_prompt_cache(twin)
    twin(mx.array([[1, 2, 3]]), cache=caches)
    assert [cache.size() for cache in caches] == [3, 3]
    del twin
    assert llama.scaled_dot_product_attention is original


def test_pickling_an_installed_model_says_what_to_do(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    static(model)
    with pytest.raises(TypeError, match=r"uninstall\(model\) first"):
        pickle.dumps(model)
    uninstall(model)
    assert pickle.loads(pickle.dumps(model)).layers


def test_factory_of_a_model_that_is_gone_says_so(tiny_model: Callable[..., nn.Module], no_collector: None) -> None:
    model = tiny_model()
    static(model)
    factory = model.make_cache
    del model
    with pytest.raises(ReferenceError, match="keep the model"):
        factory()

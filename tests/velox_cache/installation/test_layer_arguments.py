"""What install and the builder tell a method about each layer."""

import dataclasses
import json
from dataclasses import replace

import mlx.core as mx
import pytest
from calibrated import needed_calibration

from velox_cache import Calibration, EvictingKVCache, KVCacheBuilder, KVCacheConfig, calibrate, install
from velox_cache.compat.config import PREFIXES
from velox_fn import METHODS
from velox_fn.methods.fusion import TERMS
from velox_fn.registry import ALIASES, method_named

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 4
CALIBRATED = {
    "qfilters": ["filters"],
    "keydiff": ["mean_keys"],
    "expected_attention": ["query_mean", "query_cov"],
    "fusion": ["filters", "mean_keys", "means", "deviations"],
    "learned": ["score_keys", "score_key_squares", "score_values", "score_value_squares", "score_age"],
    "triattention": ["query_centres"],
}


@pytest.fixture
def calibration(tiny_model, tokenizer):
    return calibrate(tiny_model(), tokenizer, [TEXT], progress=False)


@pytest.mark.parametrize("method", METHODS)
def test_only_methods_that_score_by_calibrated_arrays_take_a_calibration(method):
    assert bool(method_named(method).calibrated) == (method in CALIBRATED)


@pytest.mark.parametrize("method", CALIBRATED)
def test_each_layer_gets_its_own_calibrated_arrays(tiny_model, calibration, method):
    model = tiny_model()
    install(model, method, budget=16, calibration=calibration)
    for layer, cache in enumerate(model.make_cache()):
        assert list(cache.method.params) == CALIBRATED[method]
        source = {"filters": calibration.filters[layer], **calibration.statistics[layer].arrays()}
        columns = mx.array([calibration.terms.index(term) for term in TERMS.split("+")])
        source |= {"means": source["term_means"][:, columns], "deviations": source["term_deviations"][:, columns]}
        for name, array in cache.method.params.items():
            assert mx.array_equal(array, source[name]).item()


@pytest.mark.parametrize("method", [method for method in CALIBRATED if method != "triattention"])
def test_calibrated_scores_are_computed_once(tiny_model, calibration, method):
    model = tiny_model()
    install(model, method, budget=16, calibration=calibration)
    assert model.make_cache()[0].method.static


def test_a_calibration_without_learned_scores_is_refused_by_the_method_that_needs_them(tiny_model, tokenizer):
    without = calibrate(tiny_model(), tokenizer, [TEXT], progress=False, learned=False)
    with pytest.raises(ValueError, match=r"no score_keys, .* without learned scores, .*calibrate again"):
        install(tiny_model(), "learned", budget=16, calibration=without)


def test_learned_protects_half_of_the_budget_unless_told_otherwise(tiny_model, calibration):
    model = tiny_model()
    for given, recent in (({}, 16), ({"recent": 7}, 7)):
        install(model, "learned", budget=32, calibration=calibration, **given)
        assert model.make_cache()[0].method.settings["recent"] == recent


@pytest.mark.parametrize("method", ["keydiff", "expected_attention", "fusion", "learned"])
def test_calibration_of_filters_only_is_refused_by_methods_that_need_more(tiny_model, calibration, method):
    filters_only = Calibration(calibration.filters)
    with pytest.raises(ValueError, match="holds filters only"):
        install(tiny_model(), method, calibration=filters_only)


def test_calibration_without_moments_is_refused_by_a_fusion_alone(tiny_model, calibration):
    older = [dataclasses.replace(layer, term_means=None, term_deviations=None) for layer in calibration.statistics]
    older = dataclasses.replace(calibration, statistics=older, terms=())
    install(tiny_model(), "keydiff", calibration=older)
    with pytest.raises(ValueError, match=r"no means and deviations of projection, key_difference.*velox calibrate"):
        install(tiny_model(), "fusion", calibration=older)


@pytest.mark.parametrize("terms", ["key_norm+projection", "value_norm", "recency+key_difference"])
def test_a_fusion_gets_the_columns_of_its_terms(tiny_model, calibration, terms):
    model = tiny_model()
    install(model, "fusion", budget=16, calibration=calibration, terms=terms)
    names = terms.split("+")
    for layer, cache in enumerate(model.make_cache()):
        found, whole = cache.method.params, calibration.statistics[layer]
        for t, name in enumerate(names):
            column = calibration.terms.index(name)
            assert mx.array_equal(found["means"][:, t], whole.term_means[:, column]).item()
            assert mx.array_equal(found["deviations"][:, t], whole.term_deviations[:, column]).item()
        assert ("filters" in found, "mean_keys" in found) == ("projection" in names, "key_difference" in names)


def test_a_fusion_without_a_calibration_is_refused(tiny_model):
    for make in (
        lambda: install(tiny_model(), "fusion"),
        lambda: KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(method="fusion")),
    ):
        with pytest.raises(ValueError, match=r"give tokenizer=tokenizer|run `velox calibrate`"):
            make()


def test_calibration_for_a_method_that_uses_none_is_refused(tiny_model, calibration):
    with pytest.raises(ValueError, match="uses no calibration"):
        install(tiny_model(), "h2o", calibration=calibration)


def test_calibration_of_another_layout_is_refused(tiny_model, calibration):
    with pytest.raises(ValueError, match="other weights than this model's"):
        install(tiny_model(num_key_value_heads=4), "keydiff", calibration=calibration)
    with pytest.raises(ValueError, match="mean_keys have shape"):
        install(tiny_model(num_key_value_heads=4), "keydiff", calibration=replace(calibration, weights=None))


def test_layers_draw_their_own_lots(tiny_model):
    model = tiny_model()
    install(model, "random", budget=16)
    assert [cache.method.settings["layer"] for cache in model.make_cache()] == [0, 1]


@pytest.mark.parametrize("method", ["h2o", "streaming_llm"])
def test_renumbering_reads_the_rope_of_the_model(tiny_model, method):
    model = tiny_model()
    install(model, method, budget=24, renumber=True)
    assert model.make_cache()[0].method.settings["rope"]["base"] == 1000.0


def test_expected_attention_reads_the_rope_of_the_model(tiny_model):
    model = tiny_model()
    install(model, "expected_attention", budget=24)
    assert model.make_cache()[0].method.settings["rope"]["base"] == 1000.0


def test_expected_attention_does_without_a_rope_that_cannot_be_read(tiny_model):
    model = tiny_model("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    install(model, "expected_attention", budget=24)
    assert model.make_cache()[0].method.settings["rope"] is None


def test_renumbering_refuses_a_rope_that_cannot_be_read(tiny_model):
    model = tiny_model("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="changes as the sequence grows"):
        install(model, "streaming_llm", renumber=True)


@pytest.mark.parametrize("method", [*PREFIXES, *ALIASES])
def test_config_has_the_method_and_its_budget(tiny_model, method):
    prefix = PREFIXES[ALIASES.get(method, method)]
    config = KVCacheConfig(method=method, **{f"{prefix}budget": 77, f"{prefix}n_sink": 3})
    caches = KVCacheBuilder.for_model(tiny_model(), config, needed_calibration(method))
    assert {(c.method.settings["budget"], c.method.settings["n_sink"]) for c in caches} == {(77, 3)}


def test_config_fields_of_the_arms_have_the_known_defaults():
    config = KVCacheConfig()
    assert (config.h2o_grace, config.h2o_rope_base, config.knorm_recent, config.snap_obs_window) == (16, None, 0, 32)


def test_rope_base_of_the_config_takes_the_place_of_the_models(tiny_model):
    config = KVCacheConfig(method="h2o", h2o_renumber=True, h2o_rope_base=77.0)
    cache = KVCacheBuilder.for_model(tiny_model(), config)[0]
    assert cache.method.settings["rope"]["base"] == 77.0


@pytest.mark.parametrize("method", [*CALIBRATED, "h2o", "streaming_llm", "random", "snapkv", "tova", "l2norm"])
def test_saved_state_rebuilds_the_method_that_a_layer_was_given(tiny_model, calibration, method):
    model = tiny_model()
    options = {"renumber": True} if method in ("h2o", "streaming_llm") else {}
    install(model, method, budget=40, calibration=calibration if method in CALIBRATED else None, **options)
    caches = model.make_cache()
    model(mx.array([list(range(60))]), cache=caches)
    again = EvictingKVCache.from_state(caches[1].state)
    assert again.method.settings == caches[1].method.settings
    assert json.loads(again.state[0]) == json.loads(caches[1].state[0])

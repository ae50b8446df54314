"""install: fresh bounded caches wherever mlx_lm asks the model for a prompt cache."""

import warnings

import mlx.core as mx
import numpy as np
import pytest
from calibrated import random_calibration
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from velox_cache import Calibration, EvictingKVCache, install, save_calibration, uninstall
from velox_fn import kept_positions, l2norm

N_LAYERS, H, D = 2, 2, 8


def calibration(n_layers=N_LAYERS, heads=H, dim=D, model_id="tiny"):
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((n_layers, heads, dim)).astype(np.float32)
    return Calibration([mx.array(layer / np.linalg.norm(layer, axis=-1, keepdims=True)) for layer in drawn], model_id)


def generated(model, prompt, n_tokens=12, **options):
    steps = generate_step(mx.array(prompt), model, max_tokens=n_tokens, **options)
    return [token for token, _ in steps]


PROMPT = np.random.default_rng(3).integers(0, 97, 60).tolist()


def test_a_prompt_cache_is_bounded_in_every_layer(tiny_model):
    model = tiny_model()
    install(model, "qfilters", budget=16, calibration=calibration())
    caches = make_prompt_cache(model)
    n_generated = len(generated(model, PROMPT, prompt_cache=caches))
    assert [(type(cache), cache.size()) for cache in caches] == [(EvictingKVCache, 16)] * N_LAYERS
    assert {cache.offset for cache in caches} <= {60 + n_generated - 1, 60 + n_generated}  # a step may run ahead


@pytest.mark.parametrize("prefill_step_size", [2048, 64], ids=["at once", "chunked"])
def test_offset_is_320_after_200_tokens_of_prefill_and_120_of_decode(tiny_model, prefill_step_size):
    model = tiny_model()
    install(model, "qfilters", budget=64, calibration=calibration())
    caches = make_prompt_cache(model)
    for start in range(0, 200, prefill_step_size):
        model(mx.array([(PROMPT * 4)[start : min(start + prefill_step_size, 200)]]), cache=caches)
    for token in PROMPT * 2:
        model(mx.array([[token]]), cache=caches)
    assert {(cache.offset, cache.size()) for cache in caches} == {(320, 64)}


def test_layers_get_their_own_filters(tiny_model):
    model = tiny_model()
    filters = calibration()
    install(model, "qfilters", budget=16, calibration=filters)
    for cache, own in zip(model.make_cache(), filters.filters, strict=True):
        np.testing.assert_array_equal(np.array(cache.method.params["filters"]), np.array(own))


def test_filters_can_be_given_by_the_path_of_their_file(tiny_model, tmp_path):
    save_calibration(calibration(), tmp_path / "calibration.npz")
    model = tiny_model()
    install(model, "qfilters", budget=16, calibration=tmp_path / "calibration.npz")
    assert "filters" in model.make_cache()[0].method.params


def test_each_prompt_gets_fresh_caches(tiny_model):
    model = tiny_model()
    install(model, "qfilters", budget=16, calibration=calibration())
    first = generated(model, PROMPT)
    generated(model, PROMPT[::-1] * 2)
    assert generated(model, PROMPT) == first


def test_a_budget_as_long_as_the_text_changes_nothing(tiny_model):
    model = tiny_model()
    plain = generated(model, PROMPT)
    install(model, "qfilters", budget=80, calibration=calibration())
    assert generated(model, PROMPT) == plain


def test_only_full_attention_layers_are_bounded_and_the_report_says_so(tiny_model):
    model = tiny_model("gemma3_text", num_hidden_layers=4)
    report = install(model, "qfilters", budget=16, calib_tokens=4)
    caches = model.make_cache()
    assert [type(cache) for cache in caches] == [RotatingKVCache, EvictingKVCache] * 2
    assert [entry.bounded for entry in report.layers] == [False, True] * 2
    assert "bounds 2 of 4 layers" in str(report)
    assert "not bounded, layers 0, 2: " in str(report)


def test_the_report_says_things_once_and_not_per_layer(tiny_model):
    model = tiny_model("gemma3_text", num_hidden_layers=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = install(model, "qfilters", budget=16, calib_tokens=4)
        generated(model, PROMPT)
    assert not [warning for warning in caught if "velox" in str(warning.filename)]
    assert len(str(report).splitlines()) == 3


def test_uninstall_gives_the_model_its_own_caches_back(tiny_model):
    model = tiny_model()
    plain = generated(model, PROMPT)
    install(model, "qfilters", budget=16, calibration=calibration())
    uninstall(model)
    assert [type(cache) for cache in make_prompt_cache(model)] == [KVCache] * N_LAYERS
    assert generated(model, PROMPT) == plain


def test_uninstall_gives_back_a_make_cache_that_the_user_had_set(tiny_model):
    model = tiny_model()
    model.make_cache = own = lambda: [KVCache() for _ in model.layers]
    install(model, "qfilters", budget=16)
    install(model, "qfilters", budget=32)
    uninstall(model)
    assert model.make_cache is own


def test_uninstall_twice_or_of_nothing_is_harmless(tiny_model):
    model = tiny_model()
    uninstall(model)
    install(model, "qfilters", budget=16)
    uninstall(model)
    uninstall(model)


def test_a_second_install_replaces_the_first(tiny_model):
    model = tiny_model()
    install(model, "qfilters", budget=16)
    install(model, "qfilters", budget=24)
    assert model.make_cache()[0].method.settings["budget"] == 24
    uninstall(model)
    assert type(make_prompt_cache(model)[0]) is KVCache


def test_a_refused_install_leaves_the_first_in_place(tiny_model):
    model = tiny_model()
    install(model, "qfilters", budget=16)
    with pytest.raises(ValueError, match="budget"):
        install(model, "qfilters", budget=0)
    assert model.make_cache()[0].method.settings["budget"] == 16


def test_an_install_refused_for_its_queries_leaves_the_first_in_place(tiny_model):
    model = tiny_model("gemma2")
    install(model, "qfilters", budget=16)
    with pytest.raises(ValueError, match="queries"):
        install(model, "h2o", budget=32)
    assert model.make_cache()[0].method.settings["budget"] == 16


def test_a_second_install_with_true_queries_still_sees_them(tiny_model):
    model = tiny_model()
    install(model, "h2o", budget=24)
    install(model, "h2o", budget=32)
    assert len(generated(model, PROMPT)) == 12
    uninstall(model)
    assert len(generated(model, PROMPT)) == 12


def test_recent_is_three_quarters_of_the_budget_unless_told_otherwise(tiny_model):
    model = tiny_model()
    assert install(model, "qfilters", budget=64).settings["recent"] == 48
    assert install(model, "qfilters", budget=64, recent=0).settings["recent"] == 0
    assert install(model, "qfilters", budget=5, n_sink=4).settings["recent"] == 0


def test_recent_tokens_survive_generation(tiny_model):
    model = tiny_model()
    install(model, "qfilters", budget=16, recent=4, calibration=calibration())
    caches = make_prompt_cache(model)
    generated(model, PROMPT, prompt_cache=caches)
    for cache in caches:
        newest = np.arange(cache.offset - 4, cache.offset)
        assert (np.array(kept_positions(cache.record))[0, :, -4:] == newest).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "qfilter"}, "there is no method 'qfilter'; the methods are qfilters"),
        ({"bugdet": 16}, "qfilters has no setting 'bugdet'; its settings are budget"),
        ({"layer": 3}, "has no setting 'layer'"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"budget": "64"}, "not text; write budget=64"),
        ({"budget": 16.0}, r"number of rows.*velox_cache\.generate"),
        ({"budget": 16, "recent": 16}, "must be smaller than budget"),
        ({"budget": 16, "recent": -1}, "recent must be at least 0"),
        ({"budget": 16, "sign": 0}, "sign must be one of 1, -1"),
        ({"queries": "real"}, "queries must be one of 'true', 'proxy', got 'real'"),
        ({"calibrate": "always"}, "calibrate must be"),
        ({"filters": calibration(heads=3)}, r"layer 0 has 2 KV heads of dimension 8.*\(3, 8\)"),
        ({"filters": calibration(dim=16)}, r"layer 0 has 2 KV heads of dimension 8.*\(2, 16\)"),
        ({"filters": calibration(n_layers=1)}, "covers 1 layers, but the model has 2"),
        ({"filters": calibration(n_layers=3)}, "covers 3 layers, but the model has 2"),
        ({"method": "l2norm", "filters": calibration()}, "uses no calibration"),
        ({"method": "h2o", "rollback": 4}, "rollback=4 cannot work with h2o"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(tiny_model, arguments, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        install(model, **{"method": "qfilters", **arguments})
    assert type(make_prompt_cache(model)[0]) is KVCache


def test_a_model_without_full_attention_is_refused_with_the_reason(tiny_model):
    model = tiny_model("gemma3_text", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"no layer of this model can be bounded.*sliding window"):
        install(model, "qfilters", budget=16)


@pytest.mark.parametrize("given", [[mx.ones((2, 8))] * 2, mx.ones((2, 8)), 5], ids=["list", "array", "int"])
def test_what_is_no_calibration_is_refused(given, tiny_model):
    with pytest.raises(ValueError, match=r"calibration must be .* Calibration\(arrays\)"):
        install(tiny_model(), "qfilters", calibration=given)


def test_a_smaller_max_kv_size_is_not_ignored_silently(tiny_model):
    model = tiny_model()
    install(model, "l2norm", budget=64)
    with pytest.warns(
        UserWarning, match=r"max_kv_size=8 has no effect .* up to 64 rows; install with budget=8"
    ) as told:
        make_prompt_cache(model, max_kv_size=8)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="max_kv_size=8"):
        generated(model, PROMPT, max_kv_size=np.int64(8))


@pytest.mark.parametrize("max_kv_size", [None, 64, 4096])
def test_a_max_kv_size_that_holds_anyway_says_nothing(tiny_model, max_kv_size):
    model = tiny_model()
    install(model, "l2norm", budget=[16, 64])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [cache.size() for cache in make_prompt_cache(model, max_kv_size)] == [0, 0]


@pytest.mark.parametrize("method", ["keydiff", "expected_attention"])
def test_what_only_a_calibrated_score_allows_is_judged_with_the_calibration(tiny_model, method):
    model = tiny_model()
    install(model, method, budget=24, rollback=4, calibration=random_calibration())
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)
    assert caches[0].trim(4) == 4
    with pytest.raises(ValueError, match="rollback=4 needs"):
        install(model, method, budget=24, rollback=4)


@pytest.mark.parametrize("widths", [{"bits": 8}, {"key_bits": 8}])
def test_an_eviction_is_given_its_widths_before(tiny_model, widths):
    with pytest.raises(ValueError, match=r"bits is key_bits and value_bits in one.*velox_fn.quantised"):
        install(tiny_model(), l2norm(budget=24), **widths)

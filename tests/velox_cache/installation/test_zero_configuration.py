"""`install(model, budget=...)` takes the recommended method with a calibration that is found or made, never a guess."""

from dataclasses import replace

import numpy as np
import pytest

from velox_cache import KVCacheBuilder, KVCacheConfig, calibrate, install, load_calibration, save_calibration
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.tiered import TieredKVCache
from velox_cache.calibration import made_once
from velox_cache.installation import own_attention
from velox_cache.recommended import RECOMMENDED_METHOD

pytestmark = pytest.mark.calibrates


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VELOX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(made_once, "TOKENS", 600)
    monkeypatch.setattr(
        made_once.made_calibration, "__kwdefaults__", {"model_id": None, "n_tokens": 600, "losses": False}
    )


def filters_of(model):
    tiers = model.make_cache()[0].tiers
    return np.concatenate([np.array(tier.method.params["filters"]) for tier in tiers])


def test_the_first_time_it_is_made_and_then_found_without_a_tokenizer(tiny_model, tokenizer, capsys):
    first, second = tiny_model(), tiny_model()
    made = install(first, budget=16, tokenizer=tokenizer)
    assert made.method == RECOMMENDED_METHOD
    assert "made in" in capsys.readouterr().err
    found = install(second, budget=16)
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(filters_of(first), filters_of(second))
    assert found.calibration == made.calibration


@pytest.mark.parametrize("method", [RECOMMENDED_METHOD, "qfilters"])
def test_without_a_tokenizer_it_says_what_to_give(tiny_model, method):
    with pytest.raises(ValueError, match="tokenizer=tokenizer"):
        install(tiny_model(), method, budget=16)


def test_heads_share_the_rows_unless_told_otherwise(tiny_model, tokenizer):
    model = tiny_model()
    install(model, budget=16, tokenizer=tokenizer)
    assert isinstance(model.make_cache()[0], TieredKVCache)
    for alike in ({"shares": None}, {"budget": 8}, {"budget": [16, 16]}, {"pinned": [(0, 5)]}, {"method": "l2norm"}):
        install(model, **{"budget": 16} | alike)
        assert isinstance(model.make_cache()[0], EvictingKVCache)


def test_layers_of_one_head_share_nothing(tiny_model, tokenizer):
    assert install(tiny_model(num_key_value_heads=1), budget=16, tokenizer=tokenizer).shares is None


def test_a_calibration_without_losses_shares_nothing_and_is_not_made_anew(tiny_model, tokenizer, capsys):
    model = tiny_model()
    file = made_once.calibration_file(model)
    file.parent.mkdir()
    save_calibration(calibrate(model, tokenizer, ["some words " * 90], progress=False), file)
    report = install(model, budget=16, tokenizer=tokenizer)
    assert (report.shares, capsys.readouterr().err) == (None, "")


def test_attention_that_cannot_read_heads_by_themselves_leaves_the_rows_alike(tiny_model, tokenizer, monkeypatch):
    def by_hand(model, form):
        raise ValueError("attention by hand")

    monkeypatch.setattr(own_attention, "tap_of", by_hand)
    assert install(tiny_model(), budget=16, tokenizer=tokenizer).shares is None


def test_the_guess_is_there_for_those_who_ask(tiny_model):
    model = tiny_model()
    report = install(model, "qfilters", budget=16, calibrate=False)
    assert report.calibration is None
    assert "filters" not in model.make_cache()[0].method.params


@pytest.mark.parametrize("method", ["streaming_llm", "keydiff", "l2norm"])
def test_methods_that_work_by_themselves_are_left_to_it(tiny_model, method, tmp_path):
    install(tiny_model(), method, budget=16)
    assert not list(tmp_path.iterdir())


def test_a_calibration_of_other_weights_is_refused(tiny_model, tokenizer):
    other = calibrate(tiny_model(seed=1), tokenizer, ["some words " * 90], progress=False)
    with pytest.raises(ValueError, match="other weights than this model's"):
        install(tiny_model(), budget=16, filters=other)
    with pytest.raises(ValueError, match="other weights than this model's"):
        KVCacheBuilder.for_model(tiny_model(), KVCacheConfig(method="qfilters"), other)
    install(tiny_model(), budget=16, filters=replace(other, weights=None))


def test_one_that_an_older_version_left_is_made_anew(tiny_model, tokenizer):
    model = tiny_model()
    install(model, budget=16, tokenizer=tokenizer)
    file = made_once.calibration_file(model)
    save_calibration(replace(load_calibration(file), statistics=(), terms=()), file)
    install(tiny_model(), budget=16, tokenizer=tokenizer)
    assert load_calibration(file).statistics


def test_nothing_is_made_for_settings_that_cannot_work(tiny_model, tokenizer, tmp_path):
    for settings in ({"budget": 16, "recent": 16}, {"budget": 0}, {"budget": 16, "rcent": 3}):
        with pytest.raises(ValueError, match=r"budget|rcent"):
            install(tiny_model(), tokenizer=tokenizer, **settings)
    assert not list(tmp_path.iterdir())


def test_a_pair_as_mlx_lm_loads_it_is_told_how_to_take_apart(tiny_model, tokenizer):
    with pytest.raises(ValueError, match=r"model, tokenizer = mlx_lm\.load"):
        install((tiny_model(), tokenizer), budget=16)
    with pytest.raises(ValueError, match="got str"):
        install("smollm2-135m", budget=16)


def test_the_report_says_what_the_user_gets(tiny_model, tokenizer):
    model = tiny_model()
    said = str(install(model, budget=16, tokenizer=tokenizer))
    per_token = 2 * 2 * 2 * 8 * 4  # layers x keys and values x heads x dimension x bytes
    assert f"a sequence takes at most {16 * per_token // 1024} KiB in these layers" in said
    assert f"where every token took {per_token} bytes" in said
    least = min(tier.method.settings["budget"] for layer in model.make_cache() for tier in layer.tiers)
    assert f"rows leave from token {least + 1} on" in said
    assert "heads share the rows, calibrated: " in said
    assert "16 on average" in said
    assert "on 600 tokens of the Python reference" in said
    assert "rank correlation" in said


@pytest.mark.parametrize(("settings", "leaves", "rows"), [({}, 17, 16), ({"interval": 5}, 21, 21)])
def test_rows_leave_where_the_report_says_and_no_more_are_held(tiny_model, settings, leaves, rows):
    import mlx.core as mx

    model = tiny_model()
    report = install(model, "l2norm", budget=16, **settings)
    [cache, _] = caches = model.make_cache()
    held = []
    for token in range(60):
        model(mx.array([[token]]), cache=caches)
        held.append(cache.tokens_kept)
    assert report.footprint.leaves_from == leaves
    assert next(n for n, kept in enumerate(held, 1) if kept < n) == leaves
    assert report.footprint.most_bytes == rows * report.footprint.token_bytes
    assert max(held) <= rows

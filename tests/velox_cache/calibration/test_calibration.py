"""From text to filters: the queries that are taken, the layers that get a filter, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.architectures import tiny
from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.calibrating import calibrate, collect_query_activations, sign_agreement
from velox_fn.directions.query_gram import average_gqa_filters, compute_qfilters

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 4
ARCHITECTURES = {
    "llama": [True, True],
    "qwen3": [True, True],
    "phi3": [True, True],
    "mixtral": [True, True],
    "stablelm": [True, True],
    "falcon_h1": [True, True],
    "gemma3_text": [False, True],
    "gpt_oss": [False, True],
}


def svd_filters(queries):
    filters = []
    for head in queries.astype(np.float64):
        u, _, vt = np.linalg.svd(head, full_matrices=False)
        filters.append(np.sign(u[:, 0].sum()) * vt[0])
    return np.stack(filters)


def grouped(filters, n_kv_heads):
    mean = filters.reshape(n_kv_heads, -1, filters.shape[-1]).mean(1)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_filters_come_from_queries_after_rope(tiny_model, tokenizer, first_layer_queries, model_type):
    model = tiny_model(model_type)
    found = np.array(calibrate(model, tokenizer, [TEXT], progress=False).filters[0])
    tokens = tokenizer.encode(TEXT)
    after, before = (
        grouped(svd_filters(first_layer_queries(model, tokens, rotated=rotated)), 2) for rotated in (True, False)
    )
    assert (found * after).sum(-1).min() > 0.9999
    assert np.abs((found * before).sum(-1)).min() < 0.99


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_layer_with_a_plain_kv_cache_gets_a_filter(tiny_model, tokenizer, model_type):
    calibration = calibrate(tiny_model(model_type), tokenizer, [TEXT], progress=False)
    assert [f is not None for f in calibration.filters] == ARCHITECTURES[model_type]
    assert {f.shape for f in calibration.filters if f is not None} == {(2, 8)}


def test_layout_names_the_caches_that_the_model_makes(tiny_model, tokenizer):
    calibration = calibrate(tiny_model("gemma3_text"), tokenizer, [TEXT], progress=False)
    assert calibration.layer_layout == ("RotatingKVCache", "KVCache")
    assert (
        calibrate(tiny_model("falcon_h1"), tokenizer, [TEXT], progress=False).layer_layout
        == ("CacheList(ArraysCache, KVCache)",) * 2
    )


def test_calibration_records_its_origin(tiny_model, tokenizer):
    calibration = calibrate(
        tiny_model(), tokenizer, [TEXT, TEXT], max_tokens=400, model_id="tiny", dataset="a sentence", progress=False
    )
    assert (calibration.model_id, calibration.dataset) == ("tiny", "a sentence")
    assert (calibration.n_tokens, calibration.n_samples) == (400, 400)


def test_streaming_equals_collecting(tiny_model, tokenizer):
    model = tiny_model()
    streamed = calibrate(model, tokenizer, [TEXT, TEXT[::-1]], prefill_step_size=37, progress=False).filters
    collected = collect_query_activations(model, tokenizer, [TEXT, TEXT[::-1]], prefill_step_size=64)
    for filters, queries in zip(streamed, collected, strict=True):
        expected = average_gqa_filters(compute_qfilters(queries), 2)
        np.testing.assert_allclose(np.array(filters), np.array(expected), atol=1e-4)


def test_collected_queries_are_per_layer_heads_by_tokens(tiny_model, tokenizer):
    activations = collect_query_activations(tiny_model(), tokenizer, [TEXT, TEXT], max_tokens=500)
    assert [queries.shape for queries in activations] == [(4, 500, 8)] * 2


def test_layers_without_a_plain_cache_collect_nothing(tiny_model, tokenizer):
    activations = collect_query_activations(tiny_model("gemma3_text"), tokenizer, [TEXT])
    assert [queries is None for queries in activations] == [True, False]


def test_texts_do_not_see_each_other(tiny_model, tokenizer):
    model = tiny_model()
    together = collect_query_activations(model, tokenizer, [TEXT, TEXT])[1]
    n_tokens = len(TEXT)
    np.testing.assert_allclose(np.array(together[:, n_tokens:]), np.array(together[:, :n_tokens]), atol=1e-5)


def test_long_texts_are_cut_into_sequences_that_start_anew(tiny_model, tokenizer):
    model = tiny_model()
    cut = collect_query_activations(model, tokenizer, [TEXT], sequence_length=100, max_tokens=200)[1]
    apart = collect_query_activations(model, tokenizer, [TEXT[:100], TEXT[100:200]])[1]
    np.testing.assert_allclose(np.array(cut), np.array(apart), atol=1e-5)


def test_caches_installed_on_the_model_are_not_used(tiny_model, tokenizer):
    model = tiny_model()
    expected = calibrate(model, tokenizer, [TEXT], progress=False).filters
    model.make_cache = lambda: pytest.fail("the installed caches were asked for")
    found = calibrate(model, tokenizer, [TEXT], progress=False).filters
    assert all(mx.array_equal(a, b).item() for a, b in zip(found, expected, strict=True))


def test_calibration_leaves_the_model_as_it_was(tiny_model, tokenizer):
    model = tiny_model()
    tokens = mx.array([tokenizer.encode(TEXT)[:40]])
    before = model(tokens, cache=make_prompt_cache(model))
    calibrate(model, tokenizer, [TEXT], progress=False)
    assert mx.array_equal(model(tokens, cache=make_prompt_cache(model)), before).item()


def test_a_single_string_is_one_text(tiny_model, tokenizer):
    assert calibrate(tiny_model(), tokenizer, TEXT, progress=False).n_tokens == len(TEXT)


def test_progress_is_shown_only_when_asked_for(tiny_model, tokenizer, capsys):
    calibrate(tiny_model(), tokenizer, [TEXT], progress=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_refused(tiny_model, tokenizer, texts):
    with pytest.raises(ValueError, match="no token"):
        calibrate(tiny_model(), tokenizer, texts, progress=False)


def test_too_short_a_text_is_refused(tiny_model, tokenizer):
    with pytest.raises(ValueError, match="texts hold 5 tokens"):
        calibrate(tiny_model(), tokenizer, ["short"], progress=False)


@pytest.mark.parametrize("text", ["a" * 300, "<" + "a" * 300 + ">"], ids=["bare", "with tokens around it"])
def test_text_of_one_repeated_token_is_refused(tiny_model, tokenizer, text):
    with pytest.raises(ValueError, match="one of them again and again"):
        calibrate(tiny_model(), tokenizer, [text], progress=False)


@pytest.mark.parametrize("option", ["max_tokens", "sequence_length", "prefill_step_size"])
def test_options_must_be_positive(tiny_model, tokenizer, option):
    with pytest.raises(ValueError, match=option):
        calibrate(tiny_model(), tokenizer, [TEXT], progress=False, **{option: 0})


@pytest.mark.parametrize("architecture", ["gemma2", "deepseek_v32"])
def test_model_whose_attention_cannot_be_observed_is_named(tokenizer, architecture):
    model = tiny.tiny_model(architecture, vocab_size=128)
    with pytest.raises(ValueError, match=architecture):
        calibrate(model, tokenizer, [TEXT], progress=False)


def test_queries_that_are_not_finite_are_refused_with_their_layer(tiny_model, tokenizer):
    model = tiny_model()
    model.model.layers[1].self_attn.q_proj.weight *= float("nan")
    with pytest.raises(ValueError, match="layer 1 cannot be calibrated: queries must be finite"):
        calibrate(model, tokenizer, [TEXT], progress=False)


def test_query_moments_are_those_of_the_scaled_queries_of_each_kv_head(tiny_model, tokenizer, first_layer_queries):
    model = tiny_model("qwen3")
    found = calibrate(model, tokenizer, [TEXT], progress=False).statistics[0]
    queries = first_layer_queries(model, tokenizer.encode(TEXT)) / np.sqrt(8)
    for head in range(2):
        group = queries[2 * head : 2 * head + 2].reshape(-1, 8)
        np.testing.assert_allclose(np.array(found.query_mean)[head], group.mean(0), atol=1e-5)
        np.testing.assert_allclose(np.array(found.query_cov)[head], np.cov(group.T, bias=True), atol=1e-5)


def test_mean_keys_are_those_of_unit_keys_however_the_text_is_cut(tiny_model, tokenizer):
    model, tokens = tiny_model(), tokenizer.encode(TEXT)
    cache = make_prompt_cache(model)
    model(mx.array([tokens]), cache=cache)
    keys = np.array(cache[1].state[0])[0, :, : len(tokens)]
    expected = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).mean(1)
    for step in (7, 512):
        found = calibrate(model, tokenizer, [TEXT], prefill_step_size=step, progress=False).statistics[1]
        np.testing.assert_allclose(np.array(found.mean_keys), expected, atol=1e-5)


def test_layers_without_a_plain_cache_have_no_statistics(tiny_model, tokenizer):
    statistics = calibrate(tiny_model("gemma3_text"), tokenizer, [TEXT], progress=False).statistics
    assert [layer is not None for layer in statistics] == [False, True]


@pytest.fixture
def drifting_model(tiny_model):
    """A model whose queries drift far from the origin, as those of trained models do."""
    model = tiny_model(attention_bias=True, rope_theta=1e9)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = 8 * mx.random.normal((32,), key=mx.random.key(3))
    return model


def turned(calibration):
    return Calibration([None if f is None else -f for f in calibration.filters])


def test_filters_of_the_right_sign_agree(drifting_model, tokenizer):
    calibration = calibrate(drifting_model, tokenizer, [TEXT], progress=False)
    assert sign_agreement(calibration, drifting_model, tokenizer, TEXT[::-1]) > 0.9


def test_wrong_sign_is_detected_on_a_calibration_text(drifting_model, tokenizer):
    calibration = calibrate(drifting_model, tokenizer, [TEXT], progress=False)
    with pytest.raises(ValueError, match="sign is turned"):
        sign_agreement(turned(calibration), drifting_model, tokenizer, TEXT)


def test_half_wrong_signs_warn(drifting_model, tokenizer):
    first, second = calibrate(drifting_model, tokenizer, [TEXT], progress=False).filters
    mixed = Calibration([first, second * mx.array([[1.0], [-1.0]])])
    with pytest.warns(UserWarning, match="only 75%"):
        assert sign_agreement(mixed, drifting_model, tokenizer, TEXT) == 0.75


@pytest.mark.parametrize(
    "filters", [[mx.ones((2, 8))], [mx.ones((2, 8)), None], [mx.ones((3, 8))] * 2, [mx.ones((2, 16))] * 2]
)
def test_filters_of_another_layout_are_refused(drifting_model, tokenizer, filters):
    with pytest.raises(ValueError, match="made for another model"):
        sign_agreement(Calibration(filters), drifting_model, tokenizer, TEXT)

"""The yardstick (true mean attention, rank correlation), and how the scores of a real model measure on it."""

from pydoc_data.topics import topics

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_cache.calibration.calibrating import calibrate, sign_agreement
from velox_cache.calibration.predicted_attention import attention_correlation, spearman, true_mean_attention
from velox_fn.directions.key_svd import estimate_filter_dir


def attention_written_out(queries, keys, scale):
    n_heads, n_tokens, _ = queries.shape
    group = n_heads // len(keys)
    received = np.zeros(keys.shape[:2])
    for head in range(n_heads):
        for i in range(n_tokens):
            weights = np.exp(scale * keys[head // group, : i + 1] @ queries[head, i])
            received[head // group, : i + 1] += weights / weights.sum()
    return received / group / np.arange(n_tokens, 0, -1)


def ranks_written_out(x):
    return np.array([(x < value).sum() + ((x == value).sum() + 1) / 2 for value in x])


def test_true_mean_attention_equals_a_loop_written_out():
    rng = np.random.default_rng(0)
    queries, keys = rng.normal(size=(6, 17, 8)), rng.normal(size=(2, 17, 8))
    found = true_mean_attention(mx.array(queries.astype(np.float32)), mx.array(keys.astype(np.float32)), 0.5)
    np.testing.assert_allclose(np.array(found), attention_written_out(queries, keys, 0.5), rtol=1e-4)


@pytest.mark.parametrize(("queries", "keys"), [((3, 9, 8), (2, 9, 8)), ((4, 9, 8), (2, 8, 8)), ((4, 9, 8), (2, 9, 4))])
def test_shapes_that_do_not_fit_are_refused(queries, keys):
    with pytest.raises(ValueError, match="multiple of H"):
        true_mean_attention(mx.zeros(queries), mx.zeros(keys), 1.0)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
@settings(deadline=None)
def test_spearman_averages_the_ranks_of_ties(pairs):
    a, b = np.array(pairs, np.float64).T
    ranks = ranks_written_out(a), ranks_written_out(b)
    expected = np.corrcoef(*ranks)[0, 1] if all(np.ptp(r) > 0 for r in ranks) else 0.0
    assert spearman(a, b) == pytest.approx(expected, abs=1e-9)


def test_spearman_runs_along_the_last_axis():
    a = np.random.default_rng(1).normal(size=(2, 3, 20))
    np.testing.assert_allclose(spearman(a, np.exp(a)), np.ones((2, 3)))
    np.testing.assert_allclose(spearman(a, -(a**3)), -np.ones((2, 3)))


def test_spearman_of_unlike_arrays_is_refused():
    with pytest.raises(ValueError, match="one shape"):
        spearman(np.zeros(3), np.zeros(4))


def test_perfect_scores_correlate_perfectly(tiny_model, tokenizer):
    # A single query head per KV head and the same query everywhere: its logit is the key's rank.
    model = tiny_model(num_key_value_heads=4, attention_bias=True, rope_theta=1e12)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 0
        layer.self_attn.q_proj.bias = mx.random.normal((32,), key=mx.random.key(1))
    drift = [layer.self_attn.q_proj.bias.reshape(4, 1, 8) for layer in model.model.layers]
    found = attention_correlation(
        model,
        tokenizer,
        "".join(map(chr, np.random.default_rng(2).integers(97, size=120))),
        {
            "drift": lambda layer, k, v: (k * drift[layer]).sum(-1),
            "against": lambda layer, k, v: -(k * drift[layer]).sum(-1),
        },
        n_tokens=120,
        skip_last=40,
    )
    assert found["drift"].shape == (8,)
    assert found["drift"].mean() > 0.5
    np.testing.assert_allclose(found["against"], -found["drift"], atol=1e-9)


def test_too_short_a_text_is_refused(tiny_model, tokenizer):
    with pytest.raises(ValueError, match="the text holds 5 tokens"):
        attention_correlation(tiny_model(), tokenizer, "short", {})


@pytest.fixture(scope="module")
def measured(smollm2):
    """SmolLM2 calibrated on 3,072 tokens of Python's own documentation; measured on 512 tokens further on."""
    model, tokenizer = smollm2
    tokens = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    calibration = calibrate(model, tokenizer, [tokenizer.decode(tokens[:3072])], sequence_length=512, progress=False)
    held_out = tokenizer.decode(tokens[9216:9816])
    correlation = attention_correlation(
        model,
        tokenizer,
        held_out,
        {
            "calibrated": lambda layer, k, v: (k * calibration.filters[layer][:, None]).sum(-1),
            "key norm": lambda layer, k, v: -mx.linalg.norm(k, axis=-1),
            "fallback": lambda layer, k, v: (k * estimate_filter_dir(k[:, :128])[:, None]).sum(-1),
        },
    )
    return {name: per_head.mean() for name, per_head in correlation.items()} | {
        "sign": sign_agreement(calibration, model, tokenizer, held_out)
    }


@pytest.mark.real_model
@pytest.mark.timeout(900)  # calibrates on the first test that needs it
def test_calibrated_filters_predict_the_attention_of_a_real_model(measured):
    assert measured["calibrated"] >= 0.65


@pytest.mark.real_model
def test_calibrated_filters_predict_better_than_key_norm(measured):
    assert measured["calibrated"] > measured["key norm"] + 0.2


@pytest.mark.real_model
def test_fallback_predicts_nothing_on_a_real_model(measured):
    assert abs(measured["fallback"]) < 0.15


@pytest.mark.real_model
def test_queries_of_a_real_model_drift_along_their_filters(measured):
    # Observation 3.1 of the paper, on text that calibration has not seen.
    assert measured["sign"] >= 0.99

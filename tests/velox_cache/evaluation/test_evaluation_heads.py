"""Anisotropy, attention correlation, chunked prefill, memory, and made-up geometry, each against a known answer."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache.calibration.artifact import Calibration
from velox_cache.evaluation.anisotropy import anisotropy, head_anisotropy
from velox_cache.evaluation.attention import ScorerCorrelation, default_scorers, score_attention
from velox_cache.evaluation.prefill import prefill_in_chunks
from velox_cache.evaluation.synthetic_qfilters import perturbation, planted_heads, synthetic_qfilters
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.harness.memory import memory_use
from velox_fn import h2o, l2norm, qfilters, streaming_llm
from velox_fn.directions.query_gram import query_gram_init, query_gram_update

TOKENS = [int(token) for token in np.random.default_rng(5).integers(97, size=80)]


def grams_of(queries):
    return query_gram_update(query_gram_init(*queries.shape[::2]), mx.array(queries.astype(np.float32)))


def drifting(drift, n=4000, seed=0):
    """Queries [1,N,4] of unit variance around (drift, 0, 0, 0)."""
    return np.random.default_rng(seed).normal(size=(1, n, 4)) + np.array([drift, 0, 0, 0])


def test_a_planted_drift_is_measured():
    found = head_anisotropy(grams_of(drifting(3.0)), grams_of(drifting(3.0, seed=1)))
    assert found.mean_projection[0] == pytest.approx(3, abs=0.1)
    assert found.top_energy[0] == pytest.approx((9 + 1) / (9 + 4), abs=0.02)
    assert found.leading_ratio[0] > 20
    assert found.component_means[0] == pytest.approx([3, 0, 0, 0], abs=0.1)


def test_queries_without_a_drift_are_spread_evenly():
    found = head_anisotropy(grams_of(drifting(0.0)), grams_of(drifting(0.0, seed=1)))
    assert found.top_energy[0] == pytest.approx(1 / 4, abs=0.02)


def test_a_drift_that_turns_round_is_negative():
    found = head_anisotropy(grams_of(drifting(3.0)), grams_of(drifting(-3.0)))
    assert found.mean_projection[0] == pytest.approx(-3, abs=0.1)
    assert found.positive_share == 0


def test_anisotropy_covers_every_query_head(tiny_model):
    found = anisotropy(tiny_model(), TOKENS, TOKENS)
    assert found.mean_projection.shape == found.top_energy.shape == (2 * 4,)
    assert [means.shape for means in found.component_means] == [(8,), (8,)]
    assert found.positive_share == 1  # on the text that it was fitted to, by construction


def test_anisotropy_without_tokens_is_refused(tiny_model):
    with pytest.raises(ValueError, match="no tokens"):
        anisotropy(tiny_model(), [], TOKENS)


def test_a_score_that_is_the_attention_correlates_perfectly(tiny_model, tokenizer):
    model = tiny_model(num_key_value_heads=4, attention_bias=True, rope_theta=1e12)
    for layer in model.model.layers:  # the same query everywhere: its logit is the key's rank
        layer.self_attn.q_proj.weight *= 0
        layer.self_attn.q_proj.bias = mx.random.normal((32,), key=mx.random.key(1))
    filters = [layer.self_attn.q_proj.bias.reshape(4, 8) for layer in model.model.layers]
    text = "".join(map(chr, np.random.default_rng(2).integers(97, size=120)))
    scorers = default_scorers(Calibration(filters))
    found = {one.scorer: one for one in score_attention(model, tokenizer, text, scorers, n_tokens=120)}
    assert found["qfilters"].per_head.shape == (2, 4)
    assert found["qfilters"].mean > 0.5
    assert found["qfilters"].sign_correct == 1
    assert found["qfilters"].mean > found["l2norm"].mean


def test_layers_without_a_plain_cache_are_not_in_the_heat_map(tiny_model, tokenizer):
    model = tiny_model("gemma3_text")
    found = score_attention(model, tokenizer, "ab" * 60, {"norm": lambda i, k, v: (k * k).sum(-1)}, n_tokens=100)
    assert found[0].per_head.shape == (1, 2)


def test_signs_count_heads():
    assert ScorerCorrelation("s", np.array([[0.2, -0.1], [0.3, 0.4]])).sign_correct == 0.75


@pytest.fixture
def rows():
    return (mx.random.normal((1, 2, 50, 8), key=mx.random.key(i)) for i in (0, 1))


def test_chunks_of_a_static_method_keep_the_same_rows(rows):
    found = prefill_in_chunks(l2norm(budget=16, recent=4), *rows, (7, 1), repeat=1)
    assert [(one.chunk, one.calls, one.same_rows) for one in found] == [(50, 1, True), (7, 8, True), (1, 50, True)]


def test_chunks_of_a_method_that_depends_on_them_are_told_apart(rows):
    found = prefill_in_chunks(h2o(budget=12, n_sink=0, grace=1), *rows, (1,), repeat=1)
    assert not found[1].same_rows


def test_memory_counts_what_a_cache_holds(tiny_model):
    model = tiny_model()
    bounded = memory_use(model, cache_maker(model, Arm("s", "streaming_llm", {"budget": 16})), TOKENS, 40)
    full = memory_use(model, cache_maker(model, FULL), TOKENS, 40)
    assert (bounded.usage.rows_kept, full.usage.rows_kept) == (16, 80)
    assert bounded.held_bytes < full.held_bytes
    assert full.held_bytes >= full.usage.full_bytes
    assert full.peak_bytes >= full.held_bytes


def test_memory_of_decoding_is_told_apart_from_that_of_blocks(tiny_model):
    model = tiny_model()
    used = memory_use(model, cache_maker(model, Arm("s", "streaming_llm", {"budget": 16})), TOKENS, 78, n_steps=2)
    assert used.usage.tokens_seen == len(TOKENS)
    assert used.held_bytes <= used.steps_peak_bytes < used.peak_bytes


def test_perturbation_of_a_cache_that_keeps_everything_is_nothing():
    keys, values, queries, _ = planted_heads("paper_like", 40, seed=0)
    assert perturbation(streaming_llm(budget=64), keys, values, queries) == pytest.approx(0, abs=1e-6)


def test_perturbation_equals_attention_written_out():
    keys, values, queries, _ = planted_heads("isotropic", 24, seed=0)
    k, v, q = (np.array(x[0], np.float64) for x in (keys, values, queries))

    def attend(kept):
        weights = np.exp(q @ k[:, kept].swapaxes(1, 2) / np.sqrt(k.shape[-1]))
        return weights / weights.sum(-1, keepdims=True) @ v[:, kept]

    kept = [*range(4), *range(16, 24)]
    expected = np.linalg.norm(attend(kept) - attend(range(24))) / np.linalg.norm(attend(range(24)))
    assert perturbation(streaming_llm(budget=12), keys, values, queries) == pytest.approx(expected, rel=1e-4)


def test_a_filter_along_the_axis_beats_one_against_it():
    keys, values, queries, axes = planted_heads("paper_like", 256, seed=0)
    filters = mx.array(axes.astype(np.float32))
    along = perturbation(qfilters(budget=64, filters=filters), keys, values, queries)
    against = perturbation(qfilters(budget=64, filters=filters, sign=-1), keys, values, queries)
    assert along < 0.5 < against


@pytest.fixture(scope="module")
def synthetic():
    return synthetic_qfilters((256,), (64,), n_seeds=3)


def test_the_key_svd_direction_finds_the_planted_axis_but_one_sign_alone_does_not_win(synthetic):
    of = {
        arm: np.mean([one.against_random for one in synthetic if (one.geometry, one.arm) == ("paper_like", arm)])
        for arm in ("sign=+1", "sign=-1", "best of signs")
    }
    assert min(one.filter_cosine for one in synthetic if one.geometry == "paper_like") > 0.9
    assert of["best of signs"] > 0.1
    assert of["best of signs"] > max(of["sign=+1"], of["sign=-1"])


def test_no_arm_wins_by_much_where_no_direction_means_anything(synthetic):
    isotropic = [one for one in synthetic if one.geometry == "isotropic" and one.arm.startswith("sign")]
    assert abs(np.mean([one.against_random / one.perturbation for one in isotropic])) < 0.1
    assert all(one.filter_cosine is None for one in isotropic)


def test_h2o_protects_no_more_recent_rows_than_the_other_arms(synthetic):
    found = next(one for one in synthetic if (one.geometry, one.seed, one.arm) == ("paper_like", 0, "h2o"))
    keys, values, queries, _ = planted_heads("paper_like", 256, seed=0)
    assert found.perturbation == perturbation(h2o(budget=64, grace=0), keys, values, queries)


def test_synthetic_numbers_are_the_same_twice(synthetic):
    assert synthetic_qfilters((256,), (64,), n_seeds=3) == synthetic

"""Reading, perplexity and fidelity, on models whose answers are known."""

import math

import mlx.core as mx
import numpy as np
import pytest
from next_is_plus_one import NextIsPlusOne

from velox_cache import install, uninstall
from velox_cache.evaluation import CacheUsage, Reading, read_passage
from velox_cache.harness.fidelity import fidelity
from velox_cache.harness.perplexity import perplexity

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def a_reading(probabilities, targets):
    return Reading(
        mx.log(mx.array(probabilities, mx.float32)), mx.array(targets, mx.int32), CacheUsage(len(targets), 0, 0, 0)
    )


def test_perplexity_of_a_model_that_knows_nothing_is_the_vocabulary():
    reading = read_passage(NextIsPlusOne(10, 0.1), TOKENS, n_context=3)
    assert perplexity(reading) == pytest.approx(10, rel=1e-6)


def test_perplexity_is_the_inverse_of_the_probability_of_what_comes():
    reading = read_passage(NextIsPlusOne(10, 0.8), [0, 1, 2, 3, 4, 5], n_context=2)
    assert perplexity(reading) == pytest.approx(1 / 0.8, rel=1e-6)


def test_perplexity_is_the_geometric_mean():
    reading = a_reading([[0.5, 0.5], [0.125, 0.875]], [0, 0])
    assert perplexity(reading) == pytest.approx(math.sqrt(2 * 8), rel=1e-6)


def test_the_tokens_after_the_context_are_scored():
    reading = read_passage(NextIsPlusOne(10, 0.5), TOKENS, n_context=5)
    assert reading.targets.tolist() == TOKENS[5:]
    assert reading.logprobs.argmax(-1).tolist() == [(token + 1) % 10 for token in TOKENS[4:-1]]


def test_distributions_sum_to_one(tiny_model):
    reading = read_passage(tiny_model(), TOKENS, n_context=4)
    np.testing.assert_allclose(np.exp(np.array(reading.logprobs)).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("block_size", [2, 5, 100])
@pytest.mark.parametrize("prefill_step_size", [1, 3, 100])
def test_block_sizes_do_not_matter_to_the_full_cache(tiny_model, block_size, prefill_step_size):
    model = tiny_model()
    blocks = read_passage(model, TOKENS, n_context=7, block_size=block_size, prefill_step_size=prefill_step_size)
    single = read_passage(model, TOKENS, n_context=7)
    np.testing.assert_allclose(np.array(blocks.logprobs), np.array(single.logprobs), atol=1e-4)


def test_reading_uses_the_installed_caches(tiny_model):
    model = tiny_model()
    install(model, "qfilters", budget=6, n_sink=1, recent=2, calib_tokens=2)
    bounded = read_passage(model, TOKENS, n_context=10)
    uninstall(model)
    assert bounded.usage.rows_kept == 6
    assert bounded.usage.tokens_seen == len(TOKENS) - 1  # the last token is only predicted


def test_progress_counts_every_token_once(tiny_model):
    counts: list[int] = []
    read_passage(tiny_model(), TOKENS, n_context=7, block_size=4, prefill_step_size=4, advance=counts.append)
    assert sum(counts) == len(TOKENS) - 1


@pytest.mark.parametrize("n_context", [0, len(TOKENS), -1])
def test_a_context_that_leaves_nothing_to_predict_is_refused(tiny_model, n_context):
    with pytest.raises(ValueError, match="n_context"):
        read_passage(tiny_model(), TOKENS, n_context=n_context)


def test_a_reading_agrees_with_itself():
    reading = a_reading([[0.7, 0.3], [0.2, 0.8]], [0, 1])
    assert (fidelity(reading, reading).agreement, fidelity(reading, reading).kl_divergence) == (1, 0)


def test_agreement_is_the_share_of_equal_first_choices():
    reference = a_reading([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4], [0.9, 0.1]], [0, 1, 0, 1])
    reading = a_reading([[0.6, 0.4], [0.6, 0.4], [0.9, 0.1], [0.8, 0.2]], [0, 1, 0, 1])
    assert fidelity(reading, reference).agreement == 0.75


def test_divergence_is_measured_from_the_reference():
    reference, reading = a_reading([[0.5, 0.5]], [0]), a_reading([[0.25, 0.75]], [0])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert fidelity(reading, reference).kl_divergence == pytest.approx(expected, rel=1e-5)


def test_tokens_that_the_reference_rules_out_add_nothing():
    reference, reading = a_reading([[1.0, 0.0]], [0]), a_reading([[1.0, 0.0]], [0])
    assert fidelity(reading, reference).kl_divergence == 0


def test_readings_of_different_passages_are_refused():
    with pytest.raises(ValueError, match="passages"):
        fidelity(a_reading([[0.5, 0.5]], [0]), a_reading([[0.5, 0.5]], [1]))

"""What calibration fits to the worth of the rows that it reads."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import calibrate
from velox_cache.calibration.row_worth import row_worth
from velox_cache.calibration.score_fit import fit_scores
from velox_cache.calibration.score_sums import no_score_sums, with_worth
from velox_cache.introspection.observed_prefill import observed_prefill

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 4
SCORES = ("score_keys", "score_key_squares", "score_values", "score_value_squares", "score_age", "score_correlation")


def test_a_calibration_holds_the_fit_to_what_the_rows_of_its_blocks_were_worth(tiny_model, tokenizer):
    model, texts = tiny_model(), [TEXT, TEXT[10:]]
    found = calibrate(model, tokenizer, texts, progress=False, prefill_step_size=40)
    sums, number = [no_score_sums(2, 8, 8)] * 2, 0
    for tokens in map(tokenizer.encode, texts):
        n_blocks = -(-len(tokens) // 40)
        for calls in observed_prefill(model, tokens, -(-len(tokens) // n_blocks)):
            for call in calls:
                worth = row_worth(call)
                if worth is not None:
                    sums[call.layer] = with_worth(sums[call.layer], worth, held_out=number % 4 == 3)
            number += 1
    assert number > 8
    choice, wanted = fit_scores(dict(enumerate(sums)))
    assert found.scores == choice
    for layer, arrays in wanted.items():
        assert list(arrays) == list(SCORES)
        for name, array in arrays.items():
            assert np.isfinite(np.array(array)).all()
            np.testing.assert_allclose(getattr(found.statistics[layer], name), array, rtol=1e-5, atol=1e-6)


def test_of_a_short_text_too_some_is_held_out(tiny_model, tokenizer):
    found = calibrate(tiny_model(), tokenizer, [TEXT], progress=False)
    assert mx.all(found.statistics[0].score_correlation != 0).item()


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "falcon_h1"])
def test_every_layer_with_a_filter_has_a_score(tiny_model, tokenizer, model_type):
    found = calibrate(tiny_model(model_type), tokenizer, [TEXT], progress=False)
    for layer, filters in zip(found.statistics, found.filters, strict=True):
        assert (layer is None) == (filters is None)
        assert layer is None or mx.isfinite(layer.score_keys).all().item()


def test_a_calibration_without_the_fit_has_no_scores(tiny_model, tokenizer):
    found = calibrate(tiny_model(), tokenizer, [TEXT], progress=False, learned=False)
    assert found.scores is None
    assert found.statistics[0].score_keys is None


def test_latent_attention_has_no_score_since_no_value_is_cached(tiny_model, tokenizer):
    assert calibrate(tiny_model("deepseek_v3"), tokenizer, [TEXT], progress=False).scores is None

"""Texts that are read again, and what calibration fits to them."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import calibrate
from velox_cache.calibration import reading_again
from velox_cache.calibration.reading_again import REQUEST, request_tokens, texts_to_read_again
from velox_cache.calibration.row_worth import row_worth
from velox_cache.calibration.score_fit import fit_scores
from velox_cache.calibration.score_sums import no_score_sums, with_text
from velox_cache.introspection.observed_prefill import observed_prefill

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 4
SCORES = ("score_keys", "score_key_squares", "score_values", "score_value_squares", "score_age", "score_correlation")


def test_pieces_are_of_one_length_spread_over_all_text_and_every_fourth_is_held_out(monkeypatch):
    monkeypatch.setattr(reading_again, "TEXT_LENGTH", 10)
    monkeypatch.setattr(reading_again, "MOST_TEXTS", 5)
    texts = texts_to_read_again([range(45), range(45, 50), range(50, 110)])
    assert [(text.tokens[0], len(text.tokens)) for text in texts] == [(0, 10), (20, 10), (50, 10), (70, 10), (90, 10)]
    assert [text.held_out for text in texts] == [False, False, False, True, False]


def test_a_short_text_is_cut_so_that_one_piece_is_held_out():
    assert [text.held_out for text in texts_to_read_again([range(70)])] == [False, False, False, True]


def test_the_request_stands_inside_a_text(tokenizer):
    assert request_tokens(lambda text: [1, *tokenizer.encode(text)]) == tokenizer.encode(REQUEST)
    assert request_tokens(tokenizer.encode) == tokenizer.encode(REQUEST)


def test_a_calibration_holds_the_fit_to_what_rows_were_worth(tiny_model, tokenizer):
    model, tokens = tiny_model(), tokenizer.encode(TEXT)
    found = calibrate(model, tokenizer, [TEXT], progress=False)
    sums = [no_score_sums(2, 8, 8)] * 2
    for text in texts_to_read_again([tokens]):
        read = [*text.tokens, *tokenizer.encode(REQUEST), *text.tokens]
        [calls] = observed_prefill(model, read, len(read))
        for call in calls:
            worth = row_worth(call, len(text.tokens))
            sums[call.layer] = with_text(sums[call.layer], worth, held_out=text.held_out)
    choice, wanted = fit_scores(dict(enumerate(sums)), (1, 1))
    assert found.scores == choice
    for layer, arrays in wanted.items():
        assert list(arrays) == list(SCORES)
        for name, array in arrays.items():
            assert np.isfinite(np.array(array)).all()
            np.testing.assert_allclose(getattr(found.statistics[layer], name), array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "falcon_h1"])
def test_every_layer_with_a_filter_has_a_score(tiny_model, tokenizer, model_type):
    found = calibrate(tiny_model(model_type), tokenizer, [TEXT], progress=False)
    for layer, filters in zip(found.statistics, found.filters, strict=True):
        assert (layer is None) == (filters is None)
        assert layer is None or mx.isfinite(layer.score_keys).all().item()


def test_without_a_second_reading_there_are_no_scores(tiny_model, tokenizer):
    found = calibrate(tiny_model(), tokenizer, [TEXT], progress=False, learned_target=None)
    assert found.scores is None
    assert found.statistics[0].score_keys is None


def test_the_target_is_what_was_asked_for(tiny_model, tokenizer):
    for target, blend in (("natural", (1, 0)), ("repeated", (0, 1)), ("both", (1, 1))):
        assert calibrate(tiny_model(), tokenizer, [TEXT], progress=False, learned_target=target).scores.blend == blend
    with pytest.raises(
        ValueError, match="learned_target must be one of None, 'natural', 'repeated', 'both', got 'all'"
    ):
        calibrate(tiny_model(), tokenizer, [TEXT], progress=False, learned_target="all")

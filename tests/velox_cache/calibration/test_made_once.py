"""A calibration of one's own: made once, found by the weights, refused for other ones."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import Calibration, load_calibration, save_calibration
from velox_cache.calibration import made_once
from velox_cache.calibration.made_once import about, check_weights, found_calibration, made_calibration


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VELOX_CACHE_DIR", str(tmp_path))


def test_what_was_made_once_is_found_by_another_model_object_of_the_same_weights(tiny_model, tokenizer):
    assert found_calibration(tiny_model()) is None
    made = made_calibration(tiny_model(), tokenizer, n_tokens=600)
    found = found_calibration(tiny_model())
    assert found is not None
    for one, other in zip(made.filters, found.filters, strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    assert found_calibration(tiny_model(seed=1)) is None


def test_one_line_says_where_it_lies_how_long_it_took_and_how_well_it_predicts(tiny_model, tokenizer, tmp_path, capsys):
    made_calibration(tiny_model(), tokenizer, n_tokens=600)
    [line] = capsys.readouterr().err.splitlines()
    [file] = (tmp_path / "calibrations").iterdir()
    assert line.startswith(f"{file}: ")
    assert "600 tokens" in line
    assert "rank correlation" in line
    assert " s, and found from now on" in line


def test_how_well_it_predicts_is_kept_in_the_file(tiny_model, tokenizer):
    made = made_calibration(tiny_model(), tokenizer, n_tokens=600)
    assert made.predicts is not None
    assert -1 <= made.predicts <= 1
    assert found_calibration(tiny_model()).predicts == made.predicts


def test_a_file_that_cannot_be_read_is_none_and_said(tiny_model, tokenizer, tmp_path, capsys):
    made_calibration(tiny_model(), tokenizer, n_tokens=600)
    [file] = (tmp_path / "calibrations").iterdir()
    file.write_bytes(b"no zip")
    capsys.readouterr()
    assert found_calibration(tiny_model()) is None
    assert "calibrating anew" in capsys.readouterr().err


def test_other_weights_are_refused_with_words(tiny_model, tokenizer):
    made = made_calibration(tiny_model(), tokenizer, n_tokens=600, model_id="the one")
    check_weights(made, tiny_model())
    with pytest.raises(ValueError, match="the one was made with other weights"):
        check_weights(made, tiny_model(seed=1))


def test_weights_that_are_not_known_are_left_to_the_shapes(tiny_model, tokenizer):
    made = made_calibration(tiny_model(), tokenizer, n_tokens=600)
    check_weights(replace(made, weights=None), tiny_model(seed=1))


def test_files_without_weights_load(tmp_path):
    plain = Calibration([mx.ones((2, 8))])
    save_calibration(plain, tmp_path / "f.npz")
    found = load_calibration(tmp_path / "f.npz")
    assert (found.weights, found.predicts) == (None, None)
    assert "not known" in about(found)


def test_a_model_in_parts_is_told_what_to_give(tiny_model, monkeypatch):
    monkeypatch.setattr(made_once, "weights_digest", lambda model: None)
    with pytest.raises(ValueError, match=r"spread over several processes.*calibration="):
        found_calibration(tiny_model())


def test_a_slow_blas_is_warned_of_before_and_only_where_progress_is_told(tiny_model, tokenizer, monkeypatch):
    import warnings

    from velox_cache.calibration import calibrating

    monkeypatch.setattr(calibrating, "slow_blas_advice", lambda: "the remedy")
    with pytest.warns(UserWarning, match="the remedy"):
        calibrating.calibrate(tiny_model(), tokenizer, ["some text of many letters " * 10])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrating.calibrate(tiny_model(), tokenizer, ["some text of many letters " * 10], progress=False)

"""Cells of `velox compare` depend on those arrays of a calibration that their method takes; it is made once."""

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from velox_cache import calibrate, save_calibration
from velox_cache.calibration import made_once
from velox_cache.cli.compare import _calibration
from velox_cache.evaluation.compare import Contender
from velox_cache.harness.arms import FULL, cache_maker, parse_arm

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 4


def test_an_arm_knows_the_calibration_that_it_takes_and_no_other(tiny_model, tokenizer):
    model = tiny_model()
    prints = {"learned": [], "qfilters": [], "streaming_llm": []}
    made = calibrate(model, tokenizer, [TEXT], progress=False)
    layers = [replace(layer, score_age=layer.score_age + 1) for layer in made.statistics]
    for calibration in (made, replace(made, statistics=layers), made):
        for method, found in prints.items():
            arm = parse_arm(method, 32, 8)
            found.append(Contender(arm, cache_maker(model, arm, calibration)).calibrated)
    assert prints["learned"][0] == prints["learned"][2] != prints["learned"][1]
    assert len(set(prints["qfilters"])) == 1
    assert prints["qfilters"][0]
    assert prints["streaming_llm"] == ["", "", ""]
    assert Contender(FULL, cache_maker(model, FULL)).calibrated == ""


def test_every_folder_takes_the_calibration_that_was_made_once(tiny_model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("VELOX_CACHE_DIR", str(tmp_path / "cache"))
    model, asked = tiny_model(), Namespace(calibration=None, calibration_tokens=None, methods="qfilters")
    made = made_once.made_calibration(model, tokenizer, n_tokens=600)
    monkeypatch.setattr(made_once, "calibrate", None)  # a second one would fail
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        taken = _calibration(asked, model, tokenizer, "tiny", folder, None)
        assert (folder / "calibration.npz").exists()
        np.testing.assert_array_equal(np.array(taken.filters[0]), np.array(made.filters[0]))
    made_once.calibration_file(model).unlink()  # the folder's results go on with what they were made with
    np.testing.assert_array_equal(
        np.array(_calibration(asked, model, tokenizer, "tiny", folder, None).filters[0]), np.array(made.filters[0])
    )


def test_a_calibration_of_other_weights_is_refused(tiny_model, tokenizer, tmp_path):
    save_calibration(calibrate(tiny_model(seed=1), tokenizer, [TEXT], progress=False), tmp_path / "other.npz")
    asked = Namespace(calibration=str(tmp_path / "other.npz"), calibration_tokens=None)
    with pytest.raises(ValueError, match="other weights"):
        _calibration(asked, tiny_model(), tokenizer, "tiny", tmp_path, None)


@pytest.mark.parametrize(
    ("methods", "losses"),
    [
        ("qfilters,learned:recent=1/2:shares=calibrated", True),
        ("fusion:shares=calibrated-layers", True),
        ("learned:shares=pyramid", False),
        ("learned", False),
    ],
)
def test_losses_are_measured_where_an_arm_asks_for_them(tiny_model, tokenizer, tmp_path, monkeypatch, methods, losses):
    told = []
    monkeypatch.setattr(made_once, "found_calibration", lambda model: None)

    def made(model, tokenizer, **asked):
        told.append(asked["losses"])
        return calibrate(model, tokenizer, [TEXT], progress=False)

    monkeypatch.setattr(made_once, "made_calibration", made)
    _calibration(
        Namespace(calibration=None, calibration_tokens=None, methods=methods),
        tiny_model(),
        tokenizer,
        "tiny",
        tmp_path,
        None,
    )
    assert told == [losses]

"""Results of `velox compare` belong to one calibration."""

from argparse import Namespace

from velox_cache import calibrate, save_calibration
from velox_cache.cli.compare import _calibration

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 4


def test_calibrations_that_differ_in_their_learned_scores_alone_are_told_apart(tiny_model, tokenizer, tmp_path):
    prints = []
    for target in ("natural", "repeated", "natural", None):
        file = tmp_path / "calibration.npz"
        save_calibration(calibrate(tiny_model(), tokenizer, [TEXT], progress=False, learned_target=target), file)
        given = Namespace(calibration=str(file), filters=str(file), calibration_tokens=64)
        prints.append(_calibration(given, None, None, "tiny", tmp_path, None)[1])
    assert prints[0] == prints[2]
    assert len(set(prints)) == 3

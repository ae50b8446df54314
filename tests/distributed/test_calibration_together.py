"""Calibration by three processes: every rank ends with what one process finds."""

from dataclasses import fields

import numpy as np
import pytest
from launching import launched, run

from velox_cache import load_calibration

pytestmark = pytest.mark.slow

N_RANKS = 3
SPREADS = ["texts", "heads", "layers"]
N_TEXTS = [1, 4]  # one text leaves two ranks without any; the lengths of four differ


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrations")
    alone = run(["calibrate_together.py", folder, "none"])
    together = launched(N_RANKS, "calibrate_together.py", folder, *SPREADS)
    assert (alone.status, together.status) == (0, 0), alone.err + together.err

    def find(spread, n_texts):
        ranks = range(1 if spread == "none" else N_RANKS)
        return [load_calibration(folder / f"{spread}_{n_texts}_{rank}.npz") for rank in ranks]

    return find


@pytest.mark.parametrize("n_texts", N_TEXTS)
@pytest.mark.parametrize("spread", SPREADS)
def test_filters_equal_those_of_one_process(calibrations, spread, n_texts):
    [alone] = calibrations("none", n_texts)
    for rank in calibrations(spread, n_texts):
        for found, expected in zip(rank.filters, alone.filters, strict=True):
            assert (1 - (np.array(found, np.float64) * np.array(expected, np.float64)).sum(-1)).max() < 1e-6


@pytest.mark.parametrize("n_texts", N_TEXTS)
@pytest.mark.parametrize("spread", SPREADS)
def test_statistics_equal_those_of_one_process(calibrations, spread, n_texts):
    [alone] = calibrations("none", n_texts)
    for rank in calibrations(spread, n_texts):
        for found, expected in zip(rank.statistics, alone.statistics, strict=True):
            for name, array in found.arrays().items():
                if name == "row_losses" or name.endswith("_codebook"):
                    continue
                # A regression's weights move by more than the rounding of its sums.
                rtol = 1e-4 if name.startswith("score_") else 1e-7
                np.testing.assert_allclose(array, getattr(expected, name), rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("spread", SPREADS)
def test_losses_equal_those_of_one_process(calibrations, spread):
    [alone] = calibrations("none", 4)
    assert alone.losses.methods == ("fusion", "learned", "qfilters")
    fixed = [0, 2]  # the weights of the learned score move a little, and with them the rows that stay
    for rank in calibrations(spread, 4):
        for found, expected in zip(rank.statistics, alone.statistics, strict=True):
            losses, wanted = np.array(found.row_losses), np.array(expected.row_losses)
            assert wanted.min() > 0
            np.testing.assert_allclose(losses[:, fixed], wanted[:, fixed], rtol=1e-3)
            np.testing.assert_allclose(losses, wanted, rtol=0.5)
    assert calibrations(spread, 1)[0].losses is None


@pytest.mark.parametrize("spread", SPREADS)
def test_codebooks_equal_those_of_one_process(calibrations, spread):
    [alone] = calibrations("none", 4)
    for rank in calibrations(spread, 4):
        for found, expected in zip(rank.statistics, alone.statistics, strict=True):
            for name in ("key_codebook", "value_codebook"):
                # Nearly every part is an entry here, so that rounding moves none of them far.
                np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-3)


@pytest.mark.parametrize("n_texts", N_TEXTS)
@pytest.mark.parametrize("spread", SPREADS)
def test_all_ranks_end_with_the_same_bits(calibrations, spread, n_texts):
    first, *others = calibrations(spread, n_texts)
    for other in others:
        for one, two in zip(first.filters, other.filters, strict=True):
            np.testing.assert_array_equal(one, two)
        for one, two in zip(first.statistics, other.statistics, strict=True):
            for name in ("row_losses", "key_smoothing", "key_codebook", "value_codebook"):
                if getattr(one, name) is not None:
                    np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("spread", SPREADS)
def test_the_artifact_is_the_whole_models(calibrations, spread):
    [alone] = calibrations("none", 4)
    # A rank that holds a part of the weights does not know their digest.
    told = [field.name for field in fields(alone) if field.name not in ("filters", "statistics", "weights")]
    for rank in calibrations(spread, 4):
        assert [getattr(rank, name) for name in told] == [getattr(alone, name) for name in told]
        assert rank.weights in (None, alone.weights)

"""The documents' names of a calibration are other names of the same things."""

import mlx.core as mx
import pytest

import velox_cache as vc
from velox_cache.cli.main import main
from velox_cache.installation.given_calibration import one_of_both


def test_the_documents_names_are_the_same_objects():
    assert vc.QFiltersCalibration is vc.Calibration
    assert (vc.load_qfilters, vc.save_qfilters) == (vc.load_calibration, vc.save_calibration)


def test_install_takes_the_documents_name(tiny_model):
    filters = [mx.array([[1.0] * 8] * 2)] * 2
    by_name = []
    for name in ("calibration", "filters"):
        model = tiny_model()
        vc.install(model, "qfilters", budget=16, **{name: vc.Calibration(filters)})
        by_name.append(model.make_cache()[0].method.params["filters"].tolist())
    assert by_name[0] == by_name[1] == filters[0].tolist()


def test_both_names_at_once_are_refused(tiny_model):
    one = vc.Calibration([mx.ones((2, 8))] * 2)
    assert one_of_both(None, one) is one_of_both(one, None) is one
    with pytest.raises(ValueError, match="calibration and filters are two names"):
        vc.install(tiny_model(), calibration=one, filters=one)


@pytest.mark.parametrize("second", ["--filters", "--calibration"])
def test_the_command_line_takes_one_file(second, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "MODEL", "--prompt", "x", "--calibration", "a.npz", second, "b.npz"])
    assert "--calibration is given twice" in capsys.readouterr().err

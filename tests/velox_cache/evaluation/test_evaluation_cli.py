"""`velox compare` and `velox eval` from the command line, on a tiny model."""

import json

import numpy as np
import pytest
from letters import Letters

from velox_cache import calibrate, save_calibration
from velox_cache.cli import compare as compare_command
from velox_cache.cli import eval_costs, eval_queries, eval_readings
from velox_cache.cli.main import main


@pytest.fixture
def place(tmp_path, tiny_model, monkeypatch):
    """A folder with a model, its filters and a text."""
    for command in (compare_command, eval_costs, eval_queries, eval_readings):
        monkeypatch.setattr(command, "load_model", lambda name: (tiny_model(), Letters()))
    model_folder = tmp_path / "tiny"
    model_folder.mkdir()
    (model_folder / "config.json").write_text("{}")
    text = "".join(map(chr, np.random.default_rng(0).integers(97, 122, size=900)))
    (tmp_path / "text.txt").write_text(text)
    filters = calibrate(tiny_model(), Letters(), [text], model_id="tiny", progress=False)
    save_calibration(filters, tmp_path / "calibration.npz")
    return tmp_path


def compare(place, *options):
    out = place / "out"
    status = main(
        [
            *("--traceback", "compare", str(place / "tiny"), "--calibration", str(place / "calibration.npz")),
            *("--texts", str(place / "text.txt"), "--context", "60", "--scored", "8", "--filler", "80", "--seeds", "1"),
            *("--methods", "qfilters,qfilters:calibrated=false:calib_tokens=16,h2o", "--budgets", "24,40"),
            *("--out", str(out), *options),
        ]
    )
    assert status == 0
    return out


def test_compare_writes_every_form_of_its_results(place, capsys):
    pytest.importorskip("matplotlib")
    out = compare(place, "--tasks", "needle", "--all-tasks")
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("cells", "results.json", "results.csv", "results.md"),
        *("perplexity.png", "tasks.png", "attention.png", "kept.png"),
    }
    found = json.loads((out / "results.json").read_text())
    assert found["about"]["workload"]["n_context"] == 60
    of = [row for row in found["rows"] if row["measure"] == "perplexity"]
    assert len(of) == 2 * (1 + 3 * 2)
    assert {row["values"]["rows_kept"] for row in of} == {67, 24, 40}
    assert (out / "results.md").read_text() in capsys.readouterr().out


def test_compare_takes_a_fusion_with_its_terms_and_its_combination(place):
    methods = "fusion,fusion:combine=max:terms=projection+key_norm"
    out = compare(place, "--methods", methods, "--budgets", "24", "--tasks", "none", "--no-heads", "--no-figures")
    arms = json.loads((out / "results.json").read_text())["about"]["arms"]
    assert [(arm["settings"].get("terms"), arm["settings"].get("combine")) for arm in arms] == [
        (None, None),
        ("projection+key_difference+value_norm", "sum"),
        ("projection+key_norm", "max"),
    ]


def test_compare_again_gives_the_same_files(place):
    out = compare(place, "--tasks", "none", "--no-figures")
    before = {path.name: path.read_bytes() for path in out.glob("results.*")}
    assert {
        path.name: path.read_bytes() for path in compare(place, "--tasks", "none", "--no-figures").glob("results.*")
    } == before


def test_compare_leaves_methods_out_of_tasks_that_the_model_cannot_do(place):
    out = compare(place, "--tasks", "needle", "--texts", "none", "--no-figures")
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["full cache"]
    assert "not discriminative" in (out / "results.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "nothing"], "there is no method"),
        (["--budgets", "many"], "whole numbers"),
        (["--tasks", "nothing"], "there is no task"),
        (["--texts", "nothing"], "there is no text"),
        (["--context", "500000"], "do not fit"),
    ],
)
def test_compare_refuses_what_it_cannot_do(place, capsys, options, message):
    status = main(
        [
            "compare",
            str(place / "tiny"),
            "--calibration",
            str(place / "calibration.npz"),
            "--out",
            str(place / "o"),
            *options,
        ]
    )
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "options", "shown"),
    [
        ("anisotropy", [], "8"),
        ("attention", ["--calibration", "calibration.npz"], "qfilters"),
        ("perplexity", ["--method", "l2norm", "--budget", "24", "--scored", "8"], "24"),
        ("fidelity", ["--method", "h2o", "--budget", "24", "--scored", "8"], "h2o"),
        ("recency", ["--calibration", "calibration.npz", "--budget", "64", "--scored", "8"], "recent=56"),
        ("memory", ["--method", "streaming_llm", "--budget", "24"], "full cache"),
    ],
)
def test_each_measurement_runs_by_itself(place, capsys, kind, options, shown):
    given = [str(place / option) if option.endswith(".npz") else option for option in options]
    arguments = ["eval", kind, str(place / "tiny"), "--text", str(place / "text.txt"), "--context", "90", *given]
    assert main(["--traceback", *arguments, "--json", str(place / "found.json")]) == 0
    assert shown in capsys.readouterr().out
    assert json.loads((place / "found.json").read_text())

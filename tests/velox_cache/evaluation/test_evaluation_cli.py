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
            *("--kinds", "prose,code", "--contexts", "1", "--length", "400", "--continuation", "6"),
            *("--tasks", "needle", "--traces", "0", "--ceilings", "oracle", "--rows", str(place / "rows")),
            *("--methods", "qfilters,qfilters:calibrated=false:calib_tokens=16,h2o", "--shares", "1/4,1/8"),
            *("--half", "choice", "--out", str(out), *options),
        ]
    )
    assert status == 0
    return out


def test_compare_writes_every_form_of_its_results(place, capsys):
    pytest.importorskip("matplotlib")
    out = compare(place, "--query-aware", "--traces", "1", "--trace-length", "90")
    names = {path.name for path in out.iterdir()}
    assert names == {"cells.jsonl", "half.txt", "results.json", "results.md", "contexts.png", "traces.png"}
    found = json.loads((out / "results.json").read_text())
    assert found["about"]["workload"]["half"] == "choice"
    counts = {name: sum(row["measure"] == name for row in found["rows"]) for name in ("context", "aware", "trace")}
    assert counts == {"context": 2 * (1 + 4 * 2), "aware": 2 * (1 + 4 * 2), "trace": 2 * (1 + 3 * 2)}
    assert {row["budget"] for row in found["rows"] if row["measure"] == "context"} == {None, 100, 50}
    assert (out / "results.md").read_text() in capsys.readouterr().out


def test_windows_are_equal_whatever_a_method_calls_them(place):
    out = compare(place, "--methods", "qfilters,h2o,snapkv,curdkv,l2norm", "--shares", "1/4", "--no-figures")
    arms = json.loads((out / "results.json").read_text())["about"]["arms"][1:-1]
    windows = [
        next(arm["settings"][name] for name in ("recent", "grace", "obs_window") if name in arm["settings"])
        for arm in arms
    ]
    assert windows == [25] * 5


def test_the_tables_say_which_arms_have_another_window(place):
    methods = "qfilters,h2o:grace=5,tova,streaming_llm,snapkv"
    out = compare(place, "--methods", methods, "--shares", "1/4,1/8", "--no-figures", "--kinds", "code")
    assert (out / "results.md").read_text().splitlines()[-1] == (
        "Latest rows that always stay, of each budget: 1/4 in qfilters, snapkv, oracle; 1/20 in h2o:grace=5; "
        "by its own rule in tova, streaming_llm."
    )


def test_compare_takes_a_fusion_with_its_terms_and_its_combination(place):
    methods = "fusion,fusion:combine=max:terms=projection+key_norm"
    out = compare(place, "--methods", methods, "--shares", "1/4", "--kinds", "code", "--no-figures")
    arms = json.loads((out / "results.json").read_text())["about"]["arms"][:-1]
    assert [(arm["settings"].get("terms"), arm["settings"].get("combine")) for arm in arms] == [
        (None, None),
        ("projection+key_difference+value_norm", "sum"),
        ("projection+key_norm", "max"),
    ]


def test_budgets_may_be_rows_and_a_text_a_file(place):
    (place / "own.txt").write_text("a b c. " * 400)
    out = compare(place, "--budgets", "64,32", "--kinds", str(place / "own.txt"), "--no-figures")
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert {row["budget"] for row in rows} == {None, 64, 32}
    assert {row["subject"] for row in rows} == {str(place / "own.txt")}


def test_compare_again_gives_the_same_files_and_measures_nothing(place):
    out = compare(place, "--no-figures")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    compare(place, "--no-figures")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_two_halves_do_not_share_a_folder(place):
    compare(place, "--no-figures")
    with pytest.raises(ValueError, match="holds results of the half 'choice'"):
        compare(place, "--no-figures", "--half", "report")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "nothing"], "there is no method"),
        (["--shares", "many"], "takes shares such as 1/4"),
        (["--tasks", "nothing"], "there is no task"),
        (["--kinds", "nothing"], "there is no text"),
        (["--ceilings", "nothing"], "there is no ceiling"),
        (["--length", "5000000"], "has no context"),
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
        ("stalled-offset", ["--method", "l2norm", "--budget", "24", "--scored", "8"], "rows held"),
        ("memory", ["--method", "streaming_llm", "--budget", "24", "--steps", "3"], "full cache"),
        ("prefill-at-intervals", ["--method", "streaming_llm", "--budget", "24", "--rounds", "1"], "interval 256"),
    ],
)
def test_each_measurement_runs_by_itself(place, capsys, kind, options, shown):
    given = [str(place / option) if option.endswith(".npz") else option for option in options]
    arguments = ["eval", kind, str(place / "tiny"), "--text", str(place / "text.txt"), "--context", "90", *given]
    assert main(["--traceback", *arguments, "--json", str(place / "found.json")]) == 0
    assert shown in capsys.readouterr().out
    assert json.loads((place / "found.json").read_text())


def test_fits_of_scores_are_shown_by_features_and_ridge(place, capsys):
    file = place / "fits.json"
    assert main(["eval", "score-fits", str(place / "tiny"), "--max-tokens", "512", "--json", str(file)]) == 0
    assert "0.003" in capsys.readouterr().out
    fits = json.loads(file.read_text())
    best = max(fits, key=lambda one: sum(one["per_head"]))
    assert [one["chosen"] for one in fits].count(True) == 1
    assert best["chosen"]

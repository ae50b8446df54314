"""The table of docs/intervals.md is what `velox eval saved-intervals` makes of the committed readings."""

import re
import warnings
from pathlib import Path

import pytest

from velox_cache.cli.main import main
from velox_cache.evaluation.intervals import IntervalReading, by_interval, read_at_intervals, saved_readings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/results/smollm2-135m/intervals"
FOLDERS = {"": FOLDER, "Gemma, ": ROOT / "docs/results/gemma3-270m/intervals"}
NAMES = {"fusion": "fusion", "h2o": "H2O"}


def test_the_documented_table_is_that_of_the_saved_readings() -> None:
    written = re.findall(
        r"^\| (?:Gemma, )?(?:fusion|H2O), .*\|$", (ROOT / "docs/intervals.md").read_text(), re.MULTILINE
    )
    expected = []
    tables = [(model, *table) for model, folder in FOLDERS.items() for table in saved_readings(folder).items()]
    for model, method, found in tables:
        n_passages = sum(one.interval == 1 for one in found)
        for row in by_interval(found):
            label = f"{model}{NAMES[method]}, {n_passages} passages"
            cells = [label, str(row["interval"]), str(row["budget"]), f"{row['KL to full']:.3f}"]
            cells += [f"{row['more than at 1']:+.3f}", row["worse on"]] if row["interval"] > 1 else ["", ""]
            expected.append("| " + " | ".join(cells) + " |")
    assert [re.sub(r" +", " ", line) for line in written] == [re.sub(r" +", " ", line) for line in expected]


def test_means_are_over_passages() -> None:
    found = [
        IntervalReading(n, 10, i, 2.0, kl, 1.0)
        for i, kls in enumerate([(1, 2), (3, 2)])
        for n, kl in zip((1, 4), kls, strict=True)
    ]
    at_once, at_four = by_interval(found)
    assert (at_once["KL to full"], at_once["more than at 1"]) == (2, 0)
    assert (at_four["KL to full"], at_four["more than at 1"], at_four["worse on"]) == (2, 0, "1 of 2")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "saved-intervals", str(FOLDER)]) == 0
    assert "fusion" in capsys.readouterr().out


@pytest.mark.parametrize("text", ['[{"positions are": "rows held"}]', "[", '"text"', "5"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["eval", "saved-intervals", str(tmp_path)]) == 2
    assert "holds no METHOD-TEXT.json" in capsys.readouterr().err
    (tmp_path / "stalled-offset.json").write_text(text)
    assert main(["eval", "saved-intervals", str(tmp_path)]) == 2
    assert "stalled-offset.json holds no readings at intervals" in capsys.readouterr().err


@pytest.mark.parametrize(("peak", "warned"), [(24, 0), (64, 1)])
def test_a_peak_that_no_passage_reaches_is_warned_of_once(tiny_model, peak: int, warned: int) -> None:
    passages = [list(range(40)), list(range(30))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_at_intervals(tiny_model(), passages, "l2norm", peak, n_context=20, intervals=(1, 4))
    assert [str(one.message)[:32] for one in caught] == ["no budget is reached: 39 tokens "] * warned

"""The table of docs/quantised.md is what `velox eval saved-quantised` makes of the committed readings."""

import re
from pathlib import Path

import pytest

from velox_cache.cli.main import main
from velox_cache.evaluation.equal_bytes import by_share, saved_readings

ROOT = Path(__file__).parents[3]
FOLDERS = [ROOT / f"docs/results/{model}/quantised" for model in ("smollm2-135m", "gemma3-270m")]


def test_the_documented_table_is_that_of_the_saved_readings() -> None:
    written = re.findall(r"^\| 1/\d+ .*\|$", (ROOT / "docs/quantised.md").read_text(), re.MULTILINE)
    expected = []
    for row in (row for folder in FOLDERS for row in by_share(saved_readings(folder))):
        plain = row["rows stored"] == "as they came"
        cells = [row["bytes of the full cache"], row["rows stored"], str(row["rows"]), f"{row['KL to full']:.3f}"]
        cells += ["" if plain else row["of as they came"], f"{row['perplexity']:.2f}"]
        cells += [f"{100 * row['same next token']:.0f} %", f"{row['MiB read in a step']:.2f}"]
        expected.append("| " + " | ".join(cells) + " |")
    assert [re.sub(r" +", " ", line) for line in written] == [re.sub(r" +", " ", line) for line in expected]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "saved-quantised", str(FOLDERS[0])]) == 0
    assert "1/16" in capsys.readouterr().out
    assert main(["eval", "saved-quantised", str(FOLDERS[0].parent)]) != 0

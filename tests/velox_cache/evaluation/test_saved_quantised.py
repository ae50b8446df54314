"""The table of docs/quantised.md is what `velox eval saved-quantised` makes of the committed readings."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from velox_cache.cli.main import main
from velox_cache.evaluation.equal_bytes import by_share, saved_readings

ROOT = Path(__file__).parents[3]
FOLDERS = [ROOT / f"docs/results/{model}/quantised" for model in ("smollm2-135m", "gemma3-270m")]
CODEBOOKS = sorted((ROOT / "docs/results/smollm2-135m").glob("codebooks-*"))


def test_the_documented_table_is_that_of_the_saved_readings() -> None:
    page, _ = (ROOT / "docs/quantised.md").read_text().split("## Codebooks")
    assert table_lines(page) == lines_of(FOLDERS)


def test_the_table_of_codebooks_is_of_theirs() -> None:
    _, page = (ROOT / "docs/quantised.md").read_text().split("## Codebooks")
    written, read = table_lines(page), lines_of(CODEBOOKS)
    assert set(written) <= set(read)
    assert {line for line in read if "codebooks" in line} <= set(written)


def table_lines(page: str) -> list[str]:
    return [re.sub(r" +", " ", line) for line in re.findall(r"^\| 1/\d+ .*\|$", page, re.MULTILINE)]


def lines_of(folders: Sequence[Path]) -> list[str]:
    lines = []
    for row in (row for folder in folders for row in by_share(saved_readings(folder))):
        plain = row["rows stored"] == "as they came"
        cells = [row["bytes of the full cache"], row["rows stored"], str(row["rows"]), f"{row['KL to full']:.3f}"]
        cells += ["" if plain else row["of as they came"], f"{row['perplexity']:.2f}"]
        cells += [f"{100 * row['same next token']:.0f} %", f"{row['MiB read in a step']:.2f}"]
        lines.append(re.sub(r" +", " ", "| " + " | ".join(cells) + " |"))
    return lines


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "saved-quantised", str(FOLDERS[0])]) == 0
    assert "1/16" in capsys.readouterr().out
    assert main(["eval", "saved-quantised", str(FOLDERS[0].parent)]) != 0

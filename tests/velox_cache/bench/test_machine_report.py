"""One file about a machine: measured, written, read back, and set into a table with others."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from calibrated import random_calibration
from mlx_lm import load
from tiny_folder import write_tiny_folder

from velox_cache.bench import end_to_end, machine_report
from velox_cache.bench.machine_report import MachineReport, measured, read_machine_report, table, write_machine_report
from velox_cache.bench.operations import Plan
from velox_cache.cli.main import main
from velox_cache.doctor.report import Finding
from velox_cache.recommended import RECOMMENDED_METHOD

COMMITTED = sorted((Path(__file__).parents[3] / "docs" / "results" / "machines").glob("*.json"))


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> MachineReport:
    patch = pytest.MonkeyPatch()
    patch.setattr(end_to_end, "PROMPT", 40)
    patch.setattr(end_to_end, "ANSWER", 4)
    patch.setattr(machine_report, "BUDGET", 24)
    patch.setattr(machine_report, "doctor", lambda: [Finding("machine", "chip", f"a chip in {sys.prefix}/bin")])
    model, tokenizer = load(str(write_tiny_folder(tmp_path_factory.mktemp("tiny"))))
    made = measured("tiny", model, tokenizer, random_calibration(), plan=Plan(budgets=(64,), rounds=1, quick=True))
    patch.undo()
    return made


def test_what_is_written_is_read_back(report, tmp_path):
    write_machine_report(report, tmp_path / "one.json")
    assert read_machine_report(tmp_path / "one.json") == report


def test_it_holds_operations_and_a_model_with_and_without_bounds(report):
    assert "decode over budget" in {one.name for one in report.bench.comparisons}
    assert [run.label for run in report.bench.runs] == ["KVCache", "RotatingKVCache", RECOMMENDED_METHOD]


def test_it_names_no_folder_of_the_machine(report):
    assert report.findings[0].value == "a chip in .../bin"


def test_the_table_has_a_row_for_each_machine(report):
    wrong = Finding("Metal kernels", "qfilters_score 1x1", "1 of 1 elements differ", fault=True)
    on_metal = replace(report, findings=(*report.findings, wrong))
    rows = table([report, on_metal]).splitlines()
    assert len(rows) == 4
    assert "none here" in rows[2]
    assert "0 of 1 right" in rows[3]
    assert len({row.count("|") for row in rows}) == 1


@pytest.mark.parametrize("content", ["no json", "{}", json.dumps({"kind": "machine report", "format": 99})])
def test_what_is_no_report_is_refused(content, tmp_path):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=r"other\.json"):
        read_machine_report(tmp_path / "other.json")


def test_the_committed_files_are_read_and_make_the_table_of_the_page(capsys):
    assert COMMITTED
    assert main(["bench", "--reports", *map(str, COMMITTED)]) == 0
    page = (COMMITTED[0].parent / "README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in page

"""The tables of docs/results say which latest rows each of their arms protects."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "docs/results"
CONTEXTS = {
    f"{file.parent.parent.name}/{file.parent.name}": file.parent
    for file in sorted(RESULTS.glob("*/*/results.json"))
    if "half" in json.loads(file.read_text())["about"]["workload"]
}
START = "Latest rows that always stay, of each budget: "


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_last_line_has_the_window_that_each_arm_was_run_with(name: str) -> None:
    last = (CONTEXTS[name] / "results.md").read_text().splitlines()[-1]
    assert last.startswith(START)
    told = {
        label: share
        for part in last.removeprefix(START).removesuffix(".").split("; ")
        for share, labels in [part.split(" in ")]
        for label in labels.split(", ")
    }
    for arm in json.loads((CONTEXTS[name] / "results.json").read_text())["about"]["arms"]:
        settings = arm["settings"]
        if settings:  # the full cache and ceilings have none
            rows = [settings[window] for window in ("recent", "grace", "obs_window") if window in settings]
            if rows:  # a share is rounded down to rows
                assert int(Fraction(told[arm["arm"]]) * settings["budget"]) == rows[0]
            else:
                assert told[arm["arm"]] == "by its own rule"

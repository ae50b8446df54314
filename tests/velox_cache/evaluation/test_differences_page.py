"""docs/differences.md shows every cell of the readings in which calibrated Q-Filters is not ahead of its two rivals."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
MODELS = {"SmolLM2": "smollm2-135m", "Gemma": "gemma3-270m"}
ARMS = ("qfilters", "qfilters:calibrated=false", "l2norm")


def test_the_cells_that_calibration_loses_are_all_shown() -> None:
    lost = []
    for name, folder in MODELS.items():
        table = (DOCS / "results" / folder / "reading/results.md").read_text()
        found = {
            (text, rows, arm): value
            for text, rows, arm, value in re.findall(
                r"^\| (\w+) \| (\d+) \| (\S+) \| ([\d.]+) \| [\d., ]+ \|", table, re.MULTILINE
            )
        }
        for text, rows in dict.fromkeys(key[:2] for key in found):
            calibrated, *rivals = (found[text, rows, arm] for arm in ARMS)
            if min(map(float, rivals)) < float(calibrated):
                lost.append((f"{name}, {text}", rows, calibrated, *rivals))
    page = (DOCS / "differences.md").read_text()
    shown = re.findall(
        r"^\| ((?:SmolLM2|Gemma), \w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert shown == lost

"""The table of docs/evaluation.md on blocks is that of the committed results."""

import json
import re
from pathlib import Path

import numpy as np

from velox_cache.evaluation.context_runs import answers_of, margin

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_on_blocks_is_that_of_the_results() -> None:
    cells: dict[str, list[str]] = {}
    for block in (0, 256, 64):
        found = json.loads((DOCS / f"results/smollm2-135m/blocks-{block}/results.json").read_text())
        assert found["about"]["workload"]["block"] == block
        for arm in dict.fromkeys(row["arm"] for row in found["rows"]):
            values = [row["values"] for row in found["rows"] if row["arm"] == arm]
            right = sum(margin(one["logprobs"]) > 0 for each in values for one in answers_of(each, "needle"))
            cells.setdefault(arm, []).append(f"{np.mean([each['kl_divergence'] for each in values]):.3f}, {right}")
    section = (DOCS / "evaluation.md").read_text().partition("## Blocks of the prefill")[2].partition("\n## ")[0]
    written = {arm: row.split(" | ") for arm, row in re.findall(r"^\| (\w+) \| (\d.*) \|$", section, re.MULTILINE)}
    assert written == {arm: row for arm, row in cells.items() if arm != "full cache"}

"""README's figure and table, made of the comparison's results: `python docs/front_page.py`.

Bold follows `velox compare`: the best method at a share of the rows, and all that it is not shown to be better than.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from velox_cache.evaluation.ceilings import CEILINGS
from velox_cache.evaluation.compare import Row
from velox_cache.evaluation.figures import COLOURS
from velox_cache.evaluation.paired import Interval
from velox_cache.evaluation.report import answered, arms_of, best_group, divergences, shares_of, summary

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "smollm2-135m" / "contexts" / "results.json"
FIGURE = ROOT / "docs" / "results" / "front-page.svg"
BEGIN, END = "<!-- results: python docs/front_page.py -->", "<!-- end of results -->"
SHOWN = ("learned", "fusion", "qfilters", "curdkv", "snapkv", "streaming_llm", "random")
"""The methods of README's table, where the results have them; the figure shows all."""
FULL, AGAINST, TASK = "full cache", "streaming_llm", "needle"


def rows_of(results: Path) -> list[Row]:
    """The rows of a comparison's results.json that are about contexts."""
    found = [Row(**row) for row in json.loads(results.read_text(encoding="utf-8"))["rows"]]
    return [row for row in found if row.measure == "context"]


def table(rows: Sequence[Row], shown: Sequence[str] = SHOWN) -> str:
    """A line for each method: KL at each share, and the planted facts that it still finds at the largest."""
    kl, hits, shares = divergences(rows), answered(rows, [TASK]), shares_of(rows)
    methods = [arm for arm in arms_of(rows, FULL) if arm not in CEILINGS]
    groups = {share: best_group({arm: kl[arm, share] for arm in methods}, lower=True) for share in shares}
    finders = best_group({arm: hits[arm, shares[0]] for arm in methods}, lower=False)
    n_facts = len(hits[FULL, ""])
    headings = [*(f"KL, {share} of the rows" for share in shares), f"facts found of {n_facts}, {shares[0]}"]
    lines = [
        f"| method | {' | '.join(headings)} |",
        "|---|" + "---:|" * (len(shares) + 1),
        f"| full cache | {'0 | ' * len(shares)}{sum(hits[FULL, '']):.0f} |",
    ]
    for arm in sorted((arm for arm in methods if arm in shown), key=lambda arm: np.mean([kl[arm, s] for s in shares])):
        cells = [_marked(f"{np.mean(kl[arm, share]):.2f}", arm in groups[share]) for share in shares]
        cells.append(_marked(f"{sum(hits[arm, shares[0]]):.0f}", arm in finders))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """KL beside StreamingLLM's, and the share of the full cache's answers, with their intervals. As SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "velox", "svg.fonttype": "none", "font.size": 9})
    from matplotlib.figure import Figure

    found = summary(rows, FULL, AGAINST)
    arms = sorted(found, key=lambda arm: (arm not in CEILINGS, -found[arm]["kl"].value))[::-1]
    arms = [arm for arm in arms if arm not in CEILINGS] + [arm for arm in arms if arm in CEILINGS]
    figure = Figure(figsize=(8.4, 0.6 + 0.27 * len(arms)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _intervals(left, [found[arm]["kl"] for arm in arms], arms)
    left.axvline(1, color="black", linewidth=0.8, linestyle=":")
    left.set(xscale="log", title="KL divergence, StreamingLLM's = 1")
    ticks = [0.1, 0.3, 1, 3]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    _intervals(right, [found[arm]["answers"] for arm in arms], arms)
    right.set(title="right answers, the full cache's = 1", xlim=(0, None))
    left.set_yticks(range(len(arms)), [f"{arm} (ceiling)" if arm in CEILINGS else arm for arm in arms])
    left.invert_yaxis()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def _intervals(ax: Any, found: Sequence[Interval], arms: Sequence[str]) -> None:
    for at, (interval, arm) in enumerate(zip(found, arms, strict=True)):
        colour = "black" if arm in CEILINGS else COLOURS[0]
        ax.plot([interval.low, interval.high], [at, at], color=colour, linewidth=2, alpha=0.5)
        ax.plot([interval.value], [at], "o", color=colour, markersize=5)
    ax.grid(axis="x", alpha=0.3)


def _marked(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def with_table(page: str, lines: str) -> str:
    """The page with these lines between the two marks. ValueError when it has not both."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs {BEGIN!r} and {END!r}, where the table goes")
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


if __name__ == "__main__":
    measured = rows_of(RESULTS)
    draw(measured, FIGURE)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), table(measured)), encoding="utf-8")

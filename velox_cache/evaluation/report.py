"""A comparison as JSON, CSV and Markdown."""

import csv
import importlib.metadata
import io
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from velox_cache.evaluation.arm_readings import gap_closed
from velox_cache.evaluation.compare import Row
from velox_cache.evaluation.task_runs import is_discriminative

_FLAT = ("perplexity", "agreement", "kl_divergence", "score", "floor", "evidence_kept", "prompt_tokens", "reply")
_USAGE = ("tokens_seen", "rows_kept", "kept_bytes", "full_bytes", "compression")


@dataclass(frozen=True)
class Spread:
    """Mean over seeds or passages, and how far they lie apart."""

    mean: float
    deviation: float  # sample standard deviation; 0 for one value
    n: int

    def text(self, digits: int = 2) -> str:
        """`mean ± deviation`, or the mean of a single value."""
        return f"{self.mean:.{digits}f} ± {self.deviation:.{digits}f}" if self.n > 1 else f"{self.mean:.{digits}f}"


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("a spread needs at least one value")
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0, len(values))


def values_of(rows: Sequence[Row], measure: str, name: str) -> dict[tuple[str, str, int | None], list[float]]:
    """One measure's values, by (subject, arm, budget), in seed order."""
    found: dict[tuple[str, str, int | None], list[float]] = {}
    for row in rows:
        if row.measure == measure:
            found.setdefault((row.subject, row.arm, row.budget), []).append(float(row.values[name]))
    return found


def mean_perplexity(rows: Sequence[Row]) -> dict[tuple[str, str, int | None], float]:
    """Perplexity over all passages of a text: exp of the mean loss, which weighs every token the same."""
    losses = values_of(rows, "perplexity", "mean_loss")
    return {key: math.exp(float(np.mean(values))) for key, values in losses.items()}


def task_verdicts(rows: Sequence[Row], full: str) -> dict[str, bool]:
    """By task: whether the full cache does well enough for the task to compare caches."""
    scores, floors = values_of(rows, "task", "score"), values_of(rows, "task", "floor")
    return {
        subject: is_discriminative(scores[subject, arm, budget], floors[subject, arm, budget])
        for subject, arm, budget in scores
        if arm == full
    }


def to_json(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Everything, one row a line, in their order. NaN does not occur. The same rows give the same text."""
    listed = ",\n".join(json.dumps({**vars(row), "values": dict(row.values)}, allow_nan=False) for row in rows)
    return f'{{"about": {json.dumps(dict(about), indent=1, allow_nan=False)},\n"rows": [\n{listed}\n]}}\n'


def to_csv(rows: Sequence[Row]) -> str:
    """A line for each arm, text or task, and seed; what belongs to heads is in the JSON only."""
    out = io.StringIO()
    names = ("measure", "subject", "seed", "arm", "budget")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*names, *_FLAT, *_USAGE))
    for row in rows:
        if row.measure in ("perplexity", "task"):
            values = [row.values.get(name, "") for name in (*_FLAT, *_USAGE)]
            writer.writerow((*(getattr(row, name) for name in names), *values))
    return out.getvalue()


def to_markdown(rows: Sequence[Row], full: str, named: str | None = None) -> str:
    """Tables: perplexity and fidelity, tasks, attention. `named`: the arm relative to which gaps are closed."""
    parts = [_reading_table(rows, full, named), _task_table(rows, full), _attention_table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def environment() -> dict[str, Any]:
    """Versions and machine."""
    packages = ("velox-kv", "mlx", "mlx-lm", "numpy")
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "blas_preloaded": os.path.basename(os.environ.get("LD_PRELOAD", "")),
    }


def _reading_table(rows: Sequence[Row], full: str, named: str | None) -> str:
    perplexities = mean_perplexity(rows)
    if not perplexities:
        return ""
    losses = values_of(rows, "perplexity", "perplexity")
    divergences = values_of(rows, "perplexity", "kl_divergence")
    agreements = values_of(rows, "perplexity", "agreement")
    lines = [
        "| text | budget | cache | perplexity | passages | gap closed | KL to full | same next token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for subject, arm, budget in _ordered(perplexities):
        key = (subject, arm, budget)
        best = arm != full and perplexities[key] == min(
            value for (s, a, b), value in perplexities.items() if (s, b) == (subject, budget) and a != full
        )
        closed = "-"
        if named is not None and (subject, named, budget) in perplexities:
            whole = perplexities[subject, full, None]
            share = gap_closed(perplexities[key], whole, perplexities[subject, named, budget])
            closed = "-" if math.isnan(share) else f"{round(share, 2) + 0.0:.0%}"
        mark = "**" if best else ""
        each = ", ".join(f"{value:.2f}" for value in losses[key])
        lines.append(
            f"| {subject} | {budget or '-'} | {arm} | {mark}{perplexities[key]:.2f}{mark} | {each} | {closed} | "
            f"{np.mean(divergences[key]):.3f} | {np.mean(agreements[key]):.1%} |"
        )
    return "\n".join(lines)


def _task_table(rows: Sequence[Row], full: str) -> str:
    scores, kept = values_of(rows, "task", "score"), values_of(rows, "task", "evidence_kept")
    if not scores:
        return ""
    verdicts, floors = task_verdicts(rows, full), values_of(rows, "task", "floor")
    subjects = list(dict.fromkeys(subject for subject, _, _ in scores))
    lines = ["| cache | budget | " + " | ".join(subjects) + " |", "|---|---|" + "---|" * len(subjects)]
    for _, arm, budget in _ordered({("", arm, budget): None for _, arm, budget in scores}):
        cells = []
        for subject in subjects:
            of = (subject, arm, budget)
            if of not in scores:  # the methods were left out of a task that the full cache cannot do
                cells.append("")
                continue
            share = "" if arm == full else f" (evidence {np.mean(kept[of]):.0%})"
            cells.append(f"{spread(scores[of]).text()}{share}")
        lines.append(f"| {arm} | {budget or '-'} | {' | '.join(cells)} |")
    guess = [f"{np.mean(floors[subject, full, None]):.2f}" for subject in subjects]
    lines.append(f"| guessing | - | {' | '.join(guess)} |")
    says = ["yes" if verdicts[subject] else "**no, not discriminative**" for subject in subjects]
    lines.append(f"| does the task compare caches? | | {' | '.join(says)} |")
    return "\n".join(lines)


def _attention_table(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row.measure == "attention"]
    lines = []
    for row in found:
        lines = [
            "| score | Spearman with true attention, mean over heads | heads with the right sign |",
            "|---|---|---|",
        ]
        for scorer, values in sorted(row.values.items(), key=lambda item: -item[1]["mean"]):
            lines.append(f"| {scorer} | {values['mean']:+.3f} | {values['sign_correct']:.1%} |")
    return "\n".join(lines)


def _ordered(keys: Mapping[tuple[str, str, int | None], Any]) -> list[tuple[str, str, int | None]]:
    """Subjects as they came; the full cache first, then by budget, then arms as they came."""
    subjects, arms = (list(dict.fromkeys(key[i] for key in keys)) for i in (0, 1))
    return sorted(keys, key=lambda key: (subjects.index(key[0]), key[2] or 0, arms.index(key[1])))

"""A comparison as Markdown tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from velox_cache.evaluation.compare import Row
from velox_cache.evaluation.paired import paired_difference
from velox_cache.evaluation.report import mean_perplexity, spread, task_verdicts, values_of
from velox_cache.harness.arm_readings import gap_closed


def to_markdown(rows: Sequence[Row], full: str, named: str | None = None) -> str:
    """Tables: perplexity and fidelity, tasks, tasks in pairs, attention.

    `named`: the arm relative to which gaps are closed, and with which the others are paired beside the full cache.
    """
    parts = [
        _reading_table(rows, full, named),
        _task_table(rows, full),
        _paired_table(rows, full, named),
        _attention_table(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def _paired_table(rows: Sequence[Row], full: str, named: str | None) -> str:
    scores = values_of(rows, "task", "score")
    verdicts = task_verdicts(rows, full) if scores else {}
    lines = []
    for subject, arm, budget in _ordered(scores):
        if arm == full or not verdicts[subject]:
            continue
        others = [scores[subject, full, None]]
        others += [scores[subject, named, budget]] if named is not None and (subject, named, budget) in scores else []
        differences = [paired_difference(scores[subject, arm, budget], other) for other in others]
        cells = [difference.points() for difference in differences] + ["-"] * (2 - len(differences))
        lines.append(f"| {subject} | {budget} | {arm} | {' | '.join(cells)} | {differences[0].n} |")
    if not lines:
        return ""
    head = f"| task | budget | cache | points beside {full} | points beside {named or 'a named arm'} | prompts |"
    note = "Differences over the same prompts with their 95 % intervals, by the normal approximation; all alike give 0."
    return "\n".join([head, "|---|---|---|---|---|---|", *lines, "", note])


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

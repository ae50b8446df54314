"""A comparison as Markdown tables."""

import math
from collections.abc import Sequence

import numpy as np

from velox_cache.evaluation.ceilings import CEILINGS
from velox_cache.evaluation.compare import Row
from velox_cache.evaluation.paired import Interval
from velox_cache.evaluation.report import (
    answered,
    arms_of,
    best_group,
    divergences,
    shares_of,
    summary,
    tasks_that_count,
)
from velox_cache.evaluation.traces import N_PARTS


def to_markdown(rows: Sequence[Row], full: str, against: str | None = None) -> str:
    """Tables: one line per arm, KL by kind of text and share, answers by task, traces.

    against: the arm that the KL divergences are relative to.
    """
    parts = [_summary_table(rows, full, against), _kind_table(rows, full), _task_table(rows, full), _trace_table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary_table(rows: Sequence[Row], full: str, against: str | None) -> str:
    if not any(row.measure == "context" for row in rows):
        return ""
    found, aware = summary(rows, full, against), _aware_share(rows, full)
    n_contexts = len({(row.subject, row.seed) for row in rows if row.measure == "context"})
    lines = [
        f"| method | mean KL relative to {against or 'nothing'} | in each context | answers of the full cache's | "
        "margin lost, nats | answers when the question is seen first |",
        "|---|---|---|---|---|---|",
    ]
    for arm, line in sorted(found.items(), key=lambda item: (item[0] in CEILINGS, _value(item[1].get("each")))):
        margin = line.get("margin")
        lost = "" if margin is None else Interval(-margin.value, -margin.high, -margin.low).text()
        cells = (
            _text(line.get("kl")),
            _text(line.get("each")),
            _percent(line.get("answers")),
            lost,
            aware.get(arm, ""),
        )
        lines.append(f"| {_shown(arm)} | {' | '.join(cells)} |")
    note = (
        f"Means over {n_contexts} contexts and the shares {', '.join(shares_of(rows))}, with 95 % intervals from "
        "resampled contexts. In each context: the geometric mean of the ratios, so that every context weighs the "
        "same. The question comes after the eviction, but for the last column. Ceilings look at what no method may "
        "see."
    )
    return "\n".join([*lines, "", note])


def _aware_share(rows: Sequence[Row], full: str) -> dict[str, str]:
    can = [task for task, counts in tasks_that_count(rows, full, "aware").items() if counts]
    hits = answered(rows, can, "aware")
    if not hits or not can:
        return {}
    shares = shares_of(rows)
    whole = float(np.mean(hits[full, ""]))
    arms = {arm for arm, share in hits if share}
    return {
        arm: f"{np.mean([np.mean(hits[arm, share]) for share in shares if (arm, share) in hits]) / whole:.0%}"
        for arm in arms
    }


def _kind_table(rows: Sequence[Row], full: str) -> str:
    if not any(row.measure == "context" for row in rows):
        return ""
    kinds = list(dict.fromkeys(row.subject for row in rows if row.measure == "context"))
    shares = shares_of(rows)
    lines = [f"| KL to the full cache | rows | {' | '.join(kinds)} | all |", "|---|---|" + "---|" * (len(kinds) + 1)]
    by_kind = [divergences([row for row in rows if row.subject == kind]) for kind in kinds] + [
        divergences(_texts(rows))
    ]
    for share in shares:
        groups = [
            best_group({arm: found[arm, share] for arm in arms_of(rows, full) if arm not in CEILINGS}, lower=True)
            for found in by_kind
        ]
        for arm in arms_of(rows, full):
            cells = [
                _marked(f"{np.mean(found[arm, share]):.3f}", arm in group)
                for found, group in zip(by_kind, groups, strict=True)
            ]
            lines.append(f"| {_shown(arm)} | {share} | {' | '.join(cells)} |")
    note = "Bold: the best method, and those that it is not better than by the interval of the paired difference."
    return "\n".join([*lines, "", note])


def _task_table(rows: Sequence[Row], full: str) -> str:
    can = tasks_that_count(rows, full)
    if not can:
        return ""
    shares = shares_of(rows)
    counting = [task for task, counts in can.items() if counts]
    whole = {task: answered(rows, [task])[full, ""] for task in can}
    n_asked = {task: _asked(rows, task, full) for task in can}
    lines = []
    if counting:
        lines = [f"| answered, at {' / '.join(shares)} | {' | '.join(counting)} |", "|---|" + "---|" * len(counting)]
        cells = [f"{np.sum(whole[task]) / n_asked[task]:.0%}" for task in counting]
        lines.append(f"| {full} | {' | '.join(cells)} |")
        for arm in arms_of(rows, full):
            cells = []
            for task in counting:
                hits = answered(rows, [task])
                cells.append(" / ".join(f"{np.sum(hits[arm, share]) / n_asked[task]:.0%}" for share in shares))
            lines.append(f"| {_shown(arm)} | {' | '.join(cells)} |")
        lines.append("")
    left = [f"{task} {np.sum(whole[task]) / n_asked[task]:.0%}" for task, counts in can.items() if not counts]
    if left:
        lines.append(
            f"The full cache is not clearly above chance (25 %) in these tasks, which do not count: {', '.join(left)}."
        )
    return "\n".join(lines)


def _trace_table(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.measure == "trace":
            found.setdefault((row.arm, row.share), []).append(row)
    if not found:
        return ""
    lines = [
        f"| trace: KL in each of {N_PARTS} stretches | rows | {' | '.join(map(str, range(1, N_PARTS + 1)))} | "
        "same next token | distinct 4-grams |",
        "|---|---|" + "---|" * (N_PARTS + 2),
    ]
    for (arm, share), own in found.items():
        parts = np.mean([row.values["kl_divergence"] for row in own], axis=0)
        same = np.mean([row.values["agreement"] for row in own])
        distinct = np.mean([row.values["distinct"] for row in own])
        cells = " | ".join(f"{part:.3f}" for part in parts)
        lines.append(f"| {arm} | {share or '1'} | {cells} | {same:.1%} | {distinct:.0%} |")
    return "\n".join(lines)


def _texts(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.measure == "context"]


def _asked(rows: Sequence[Row], task: str, full: str) -> int:
    return sum(answer["task"] == task for row in _texts(rows) if row.arm == full for answer in row.values["answers"])


def _shown(arm: str) -> str:
    return f"*{arm}* (ceiling)" if arm in CEILINGS else arm


def _marked(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _value(interval: Interval | None) -> float:
    return 0.0 if interval is None else interval.value


def _text(interval: Interval | None) -> str:
    return "" if interval is None else interval.text()


def _percent(interval: Interval | None) -> str:
    if interval is None:
        return ""
    ends = "" if math.isnan(interval.low) else f" [{interval.low:.0%}, {interval.high:.0%}]"
    return f"{interval.value:.0%}{ends}"

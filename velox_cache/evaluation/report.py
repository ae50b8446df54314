"""A comparison's rows as numbers: what each arm loses, what it still answers, and how sure that is."""

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from velox_cache.evaluation.ceilings import CEILINGS
from velox_cache.evaluation.compare import Row, Values
from velox_cache.evaluation.context_runs import answers_of, margin
from velox_cache.evaluation.paired import Interval, difference, mean_ratio, ratio
from velox_cache.evaluation.questions import CHANCE

Key = tuple[str, str]
"""(arm, share)"""
_RARE = 1 / 40


def by_context(rows: Sequence[Row], measure: str, number: Callable[[Values], float]) -> dict[Key, list[float]]:
    """One number of each context, in the same order for every arm. Raises ValueError when an arm lacks a context."""
    found: dict[Key, dict[tuple[str, int], float]] = {}
    for row in rows:
        if row.measure == measure:
            found.setdefault((row.arm, row.share), {})[row.subject, row.seed] = number(row.values)
    contexts = list(next(iter(found.values()), {}))
    for key, values in found.items():
        if set(values) != set(contexts):
            raise ValueError(f"{' '.join(key)} has not run in the same contexts as the others; run the command again")
    return {key: [values[context] for context in contexts] for key, values in found.items()}


def divergences(rows: Sequence[Row]) -> dict[Key, list[float]]:
    """Mean KL divergence from the full cache on each context's continuation."""
    return by_context(rows, "context", lambda values: values["kl_divergence"])


def tasks_that_count(rows: Sequence[Row], full: str, measure: str = "context") -> dict[str, bool]:
    """By task: whether the full cache answers so many questions as a guesser would in less than 1 of 40 cases."""
    answers: dict[str, list[bool]] = {}
    for row in rows:
        if row.measure == measure and row.arm == full:
            for answer in row.values["answers"]:
                answers.setdefault(answer["task"], []).append(margin(answer["logprobs"]) > 0)
    return {task: _luck(sum(found), len(found)) < _RARE for task, found in answers.items()}


def answered(rows: Sequence[Row], tasks: Sequence[str], measure: str = "context") -> dict[Key, list[float]]:
    """Questions of these tasks answered in each context: the right answer is likelier than each wrong one."""
    return by_context(
        rows,
        measure,
        lambda values: float(
            sum(margin(answer["logprobs"]) > 0 for task in tasks for answer in answers_of(values, task))
        ),
    )


def margins(rows: Sequence[Row], tasks: Sequence[str]) -> dict[Key, list[float]]:
    """The mean margin of the right answer in each context, in nats; 0 where no question is of these tasks."""

    def mean(values: Values) -> float:
        found = [margin(answer["logprobs"]) for task in tasks for answer in answers_of(values, task)]
        return float(np.mean(found)) if found else 0.0

    return by_context(rows, "context", mean)


def shares_of(rows: Sequence[Row]) -> list[str]:
    """The shares, the largest first."""
    return sorted({row.share for row in rows if row.share}, key=lambda share: -_number(share))


def arms_of(rows: Sequence[Row], full: str) -> list[str]:
    """The arms but the full cache, as they came; ceilings last."""
    arms = dict.fromkeys(row.arm for row in rows if row.arm != full)
    return sorted(arms, key=lambda arm: arm in CEILINGS)


def summary(rows: Sequence[Row], full: str, against: str | None) -> dict[str, dict[str, Interval]]:
    """One line per arm: KL relative to `against`'s at equal rows, of the means and in each context (`each`), the share
    of the full cache's answers, and the change of the margin.
    """
    kl, shares = divergences(rows), shares_of(rows)
    can = tasks_that_count(rows, full)
    counting = [task for task, counts in can.items() if counts]
    found: dict[str, dict[str, Interval]] = {}
    hits, seen = answered(rows, counting), margins(rows, counting)
    for arm in arms_of(rows, full):
        line: dict[str, Interval] = {}
        if against is not None:
            own, other = ([kl[name, share] for share in shares] for name in (arm, against))
            line |= {"kl": ratio(own, other), "each": mean_ratio(own, other)}
        if counting:
            line["answers"] = ratio(np.mean([hits[arm, share] for share in shares], axis=0), hits[full, ""])
            line["margin"] = difference(np.mean([seen[arm, share] for share in shares], axis=0), seen[full, ""])
        found[arm] = line
    return found


def best_group(values: Mapping[str, Sequence[float]], *, lower: bool) -> set[str]:
    """The best arm, and every other that it is not better than: the interval of their difference holds 0.

    Empty when that is all of them: then nothing is called better.
    """
    sign = 1.0 if lower else -1.0
    best = min(values, key=lambda arm: sign * float(np.mean(values[arm])))
    group = {arm for arm, own in values.items() if arm == best or not _better(values[best], own, sign)}
    return set() if len(group) == len(values) else group


def _better(one: Sequence[float], other: Sequence[float], sign: float) -> bool:
    found = difference(sign * np.asarray(one), sign * np.asarray(other))
    return found.high < 0


def to_json(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Everything, one row a line, in their order. NaN does not occur. The same rows give the same text."""
    listed = ",\n".join(json.dumps({**vars(row), "values": dict(row.values)}, allow_nan=False) for row in rows)
    return f'{{"about": {json.dumps(dict(about), indent=1, allow_nan=False)},\n"rows": [\n{listed}\n]}}\n'


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


def _luck(n_right: int, n_asked: int) -> float:
    """The probability that a guesser has so many right, or more."""
    return sum(math.comb(n_asked, n) * CHANCE**n * (1 - CHANCE) ** (n_asked - n) for n in range(n_right, n_asked + 1))


def _number(share: str) -> float:
    above, below = share.split("/")
    return int(above) / int(below)

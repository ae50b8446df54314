"""A comparison as JSON and CSV, and the values that its tables are made of."""

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

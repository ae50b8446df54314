"""What evicting at intervals costs in quality, at equal peak rows: budget + interval against a budget alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.harness.fidelity import fidelity
from velox_cache.harness.perplexity import perplexity
from velox_cache.harness.reading import read_passage
from velox_cache.harness.unreached import warn_where_nothing_leaves
from velox_cache.installation.installing import install, uninstall

INTERVALS = (1, 16, 64, 128, 256)


@dataclass(frozen=True)
class IntervalReading:
    """One interval on one passage, against the full cache."""

    interval: int  # 1: a row leaves with every token, and a block's after it
    budget: int  # peak rows less the interval
    passage: int
    perplexity: float
    kl_divergence: float  # to the full cache, nats per token
    agreement: float  # share of tokens with the same most likely next token


def read_at_intervals(
    model: nn.Module,
    passages: Sequence[Sequence[int]],
    method: str,
    peak: int,
    *,
    n_context: int,
    settings: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    intervals: Sequence[int] = INTERVALS,
    share: float | None = None,
) -> list[IntervalReading]:
    """Read each passage under `method` with at most `peak` rows, at each interval.

    The context goes in as mlx_lm's prefill does it, the rest token by token. share: of the budget that is recent; None
    is install's own. Warns where nothing was evicted. Raises ValueError as `install` does, also where an interval
    leaves no budget.
    """
    found, budgets = [], []
    for number, passage in enumerate(passages):
        uninstall(model)
        full = read_passage(model, passage, n_context=n_context)
        for interval in intervals:
            budget = peak - (interval if interval > 1 else 0)
            given = {"shares": None} | dict(settings or {}) | ({} if share is None else {"recent": int(share * budget)})
            install(model, method, budget=budget, interval=interval, calibration=calibration, calibrate=False, **given)
            reading = read_passage(model, passage, n_context=n_context)
            uninstall(model)
            budgets.append(budget)
            near = fidelity(reading, full)
            one = IntervalReading(interval, budget, number, perplexity(reading), near.kl_divergence, near.agreement)
            found.append(one)
    warn_where_nothing_leaves(budgets, max((len(passage) for passage in passages), default=1) - 1)
    return found


def by_interval(found: Sequence[IntervalReading]) -> list[dict[str, Any]]:
    """One row for each interval: the means over the passages, next to those of interval 1."""
    at_once = np.array([one.kl_divergence for one in found if one.interval == 1])
    rows: list[dict[str, Any]] = []
    for interval in dict.fromkeys(one.interval for one in found):
        those = [one for one in found if one.interval == interval]
        more = np.array([one.kl_divergence for one in those]) - at_once
        rows.append(
            {
                "interval": interval,
                "budget": those[0].budget,
                "KL to full": float(np.mean([one.kl_divergence for one in those])),
                "more than at 1": float(more.mean()),
                "worse on": f"{(more > 0).sum()} of {len(those)}" if interval > 1 else "-",
                "perplexity": float(np.exp(np.mean(np.log([one.perplexity for one in those])))),
                "same next token": float(np.mean([one.agreement for one in those])),
            }
        )
    return rows


def saved_readings(folder: Path) -> dict[str, list[IntervalReading]]:
    """The readings saved in `folder` as METHOD-TEXT.json, those of all texts together, by method.

    Raises ValueError when there are none, or a file of such a name holds something else.
    """
    found: dict[str, list[IntervalReading]] = {}
    for file in sorted(folder.glob("*-*.json")):
        method = file.stem.rpartition("-")[0]
        try:
            found.setdefault(method, []).extend(IntervalReading(**one) for one in json.loads(file.read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{file} holds no readings at intervals; give a folder that holds what `velox eval intervals --json` "
                "writes, and no other METHOD-TEXT.json"
            ) from error
    if not found:
        raise ValueError(f"{folder} holds no METHOD-TEXT.json, as `velox eval intervals --json` writes them")
    return found

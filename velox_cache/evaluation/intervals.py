"""What evicting at intervals costs in quality, at equal peak rows: budget + interval against a budget alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.harness.fidelity import fidelity
from velox_cache.harness.perplexity import perplexity
from velox_cache.harness.reading import read_passage
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
    is install's own. Raises ValueError as `install` does, also where an interval leaves no budget.
    """
    found = []
    for number, passage in enumerate(passages):
        uninstall(model)
        full = read_passage(model, passage, n_context=n_context)
        for interval in intervals:
            budget = peak - (interval if interval > 1 else 0)
            given = dict(settings or {}) | ({} if share is None else {"recent": int(share * budget)})
            install(model, method, budget=budget, interval=interval, calibration=calibration, **given)
            reading = read_passage(model, passage, n_context=n_context)
            uninstall(model)
            near = fidelity(reading, full)
            one = IntervalReading(interval, budget, number, perplexity(reading), near.kl_divergence, near.agreement)
            found.append(one)
    return found

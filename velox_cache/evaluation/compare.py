"""Run measurements over arms, cell by cell: the engine of `velox compare`, which knows no measurement itself."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from velox_cache.distributed.collectives import Group, failing_together, own_share
from velox_cache.evaluation.cells import Cells
from velox_cache.harness.arms import Arm, MakeCache
from velox_cache.installation.installed import InstalledCaches
from velox_cache.installation.tiers import settings_of

Advance = Callable[[int], object]
"""Called with the tokens done."""
Report = Callable[[str, int], object]
"""Called with what is at work and the tokens done."""
Values = Mapping[str, Any]
"""Plain JSON values by name."""


@dataclass(frozen=True, eq=False)
class Contender:
    """An arm and what makes its caches for the model at hand."""

    arm: Arm
    make: MakeCache
    share: str = ""  # of the context that its budget is, such as 1/4

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the first layer's method, defaults too, with the budgets of all where they differ; none for
        the full cache."""
        if not isinstance(self.make, InstalledCaches):
            return {}
        layers = list(self.make.methods.values())
        budgets = settings_of(layers).get("budget")
        own = {"budgets": budgets} if isinstance(budgets, list) else {}
        return {**layers[0][0].method.settings, **own}

    @functools.cached_property
    def calibrated(self) -> str:
        """A digest of the arrays that its methods take of a calibration; empty where they take none."""
        if not isinstance(self.make, InstalledCaches):
            return ""
        methods = [(layer, tier.method) for layer, tiers in self.make.methods.items() for tier in tiers]
        arrays = [(layer, *named) for layer, method in methods for named in sorted(method.params.items())]
        found = hashlib.sha256()
        for layer, name, array in arrays:
            found.update(f"{layer} {name} {array.shape}".encode() + np.array(array).tobytes())
        return found.hexdigest()[:16] if arrays else ""


@dataclass(frozen=True, eq=False)
class Measurement:
    """Something to measure of each of several caches, in one go."""

    measure: str
    subject: str  # the kind of text
    seed: int  # the context's number
    sizes: Mapping[str, Any]  # all that the numbers depend on beside model and arm
    n_tokens: int  # about how many `run` advances by
    run: Callable[[Sequence[Contender], Advance], list[dict[str, Any]]]  # one result for each contender
    compares: bool = False  # with the full cache, which must come first


@dataclass(frozen=True)
class Row:
    """One arm's numbers in one cell."""

    measure: str
    subject: str
    seed: int
    arm: str
    share: str  # of the context that it may keep; empty for the full cache
    budget: int | None
    values: Values


def compare(
    measurements: Sequence[Measurement],
    contenders: Sequence[Contender],
    cells: Cells,
    advance: Report = lambda what, n_tokens: None,
    group: Group | None = None,
) -> list[Row]:
    """Every measurement of every contender, the first of which is the full cache. What is in `cells` is not run again.

    `advance` is called with what is at work and the tokens done. group: ranks that share the measurements out, given
    the same ones; each ends with all rows, and with every cell on its disk.

    Raises ValueError when the first contender is not the full cache or two bear one name at one budget, and what the
    measurements raise; RuntimeError when another rank fails or ends, after which a new start goes on with the cells
    that are there.
    """
    if not contenders or contenders[0].arm.method is not None:
        raise ValueError("the first contender must be the full cache, which the others are compared with")
    names = [(one.arm.label, one.arm.budget) for one in contenders]
    if len(set(names)) < len(names):
        raise ValueError(f"each arm must differ from the others in name or budget, got {names}")
    if group is not None:
        keys = {one: [_key(one, other) for other in contenders] for one in measurements}
        named = {json.dumps(keys[one], sort_keys=True): one for one in measurements}
        with failing_together(group):
            done = {name: all(cells.get(key) is not None for key in keys[one]) for name, one in named.items()}
        own = own_share(list(named), group, done=done.__getitem__, cost=lambda name: named[name].n_tokens)
        with failing_together(group):
            for name in own:
                _measured(named[name], contenders, cells, advance)
        cells.share([key for one in measurements for key in keys[one]], group)
    return [row for one in measurements for row in _measured(one, contenders, cells, advance)]


def _measured(one: Measurement, contenders: Sequence[Contender], cells: Cells, advance: Report) -> list[Row]:
    done = 0

    def step(n_tokens: int) -> None:
        nonlocal done
        done += n_tokens
        advance(f"{one.measure}: {one.subject} {one.seed + 1}", n_tokens)

    rows = _rows(one, contenders, cells, step)
    step(one.n_tokens - done)
    return rows


def _rows(one: Measurement, contenders: Sequence[Contender], cells: Cells, advance: Advance) -> list[Row]:
    keys = {contender: _key(one, contender) for contender in contenders}
    found = {contender: cells.get(key) for contender, key in keys.items()}
    missing = [contender for contender in contenders if found[contender] is None]
    # The full cache runs again next to arms that were added later.
    together = [contenders[0], *missing] if missing and one.compares and contenders[0] not in missing else missing
    if together:
        for contender, values in zip(together, one.run(together, advance), strict=True):
            if contender in missing:
                found[contender] = values
                cells.put(keys[contender], values)
    return [
        Row(
            one.measure,
            one.subject,
            one.seed,
            contender.arm.label,
            contender.share,
            contender.arm.budget,
            found[contender] or {},
        )
        for contender in contenders
    ]


def _key(one: Measurement, contender: Contender) -> dict[str, Any]:
    arm = contender.arm
    return {
        "measure": one.measure,
        "subject": one.subject,
        "seed": one.seed,
        "arm": arm.label,
        "budget": arm.budget,
        "method": [arm.method, contender.settings or dict(arm.settings), contender.calibrated],
        "sizes": dict(one.sizes),
    }

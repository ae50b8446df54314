"""What CurDKV's choices cost on a real model: true queries or keys in their place, blocks or tokens, a window.

Every arm protects a quarter of its budget as recent rows, H2O too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.harness.arm_readings import ArmReading, read_arms
from velox_cache.harness.arms import FULL, Arm, MakeCache, cache_maker
from velox_cache.installation.installing import install, uninstall


def curdkv_variants(
    model: nn.Module,
    tokens: Sequence[int],
    budget: int,
    *,
    n_context: int,
    calibration: Calibration | None = None,
    by_token: bool = False,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> dict[str, ArmReading]:
    """Read `tokens` under each variant at one budget, the full cache first; see `read_arms`.

    calibration: for the Q-Filters arm, which is left out without one. by_token: also the arms that score token by
    token, which take minutes for a context of 1,000 tokens. Raises ValueError as `install` and `read_arms` do.
    """
    recent = budget // 4
    makers: dict[str, MakeCache] = {"full cache": cache_maker(model, FULL)}
    if calibration is not None:
        arm = Arm("qfilters", "qfilters", {"budget": budget, "recent": recent})
        makers["qfilters"] = cache_maker(model, arm, calibration)
    makers["h2o"] = cache_maker(model, Arm("h2o", "h2o", {"budget": budget, "recent": recent}))
    for queries in ("true", "proxy"):
        variants: dict[str, dict[str, Any]] = {"": {}, ", window=64": {"window": 64}, ", mean": {"mean": True}}
        if by_token:
            variants[", token by token"] = {"granularity": "token"}
        for label, settings in variants.items():
            makers[f"curdkv, {queries} queries{label}"] = _maker(
                model, queries, {"budget": budget, "recent": recent, **settings}
            )
    readings = read_arms(model, tokens, list(makers.values()), n_context=n_context, advance=advance)
    return dict(zip(makers, readings, strict=True))


def _maker(model: nn.Module, queries: str, settings: dict[str, Any]) -> MakeCache:
    uninstall(model)
    install(model, "curdkv", queries=queries, **settings)
    make: MakeCache = model.make_cache
    uninstall(model)
    return make

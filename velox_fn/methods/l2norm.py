"""L2Norm: keep the keys of the smallest norm, which get high attention.

A row scores

    s_i = -|k_i|^2

The square orders rows as the norm does and needs no root.

Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv:2406.11430), section 3.

Differs from the paper:

- `n_sink` leading tokens always stay. `recent` trailing ones may.
- Every layer has the budget that it is given. The paper leaves the first two layers whole.
"""

import mlx.core as mx

from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.scorers import square_terms
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, StaticState, static_eviction


def l2norm(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    rollback: int = 0,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[StaticState]:
    """The L2Norm method: keep the keys [B,H,S,D] of the smallest norm.

    Source: arXiv:2406.11430, section 3.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        rollback: tokens that can be taken back after evictions.
        use_metal_kernels: for eviction. True or False; None uses them where they run.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        A static `Eviction`.

    Raises:
        ValueError: a count cannot work.

    Example:
        >>> from velox_fn import l2norm
        >>> l2norm(budget=256).settings["budget"]
        256
    """
    method = static_eviction(
        "l2norm",
        _minus_squared_norm,
        budget=budget,
        n_sink=n_sink,
        recent=recent,
        rollback=rollback,
        use_metal_kernels=use_metal_kernels,
    )
    return at_intervals(pinning(method, pinned), interval)


def _minus_squared_norm(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    return Scores(-square_terms(keys), unseen=(values,))

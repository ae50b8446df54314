"""KeyDiff: keep the keys that are least like the mean key.

With the mean m of the cached keys, each of unit norm, a row scores

    s_i = -cos(m, k_i)

There are two forms:

- As in the paper, m is the mean over the cache as it stands: kept rows and the new block. It is taken anew with each
  call, so every score moves.
- With `mean_keys`, calibrated on text, m is fixed. A row is scored once, and the kept set does not depend on how tokens
  are split into calls. This form is this project's, not the paper's.

Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments" (arXiv:2504.15364), section 3.

Differs from the paper:

- `n_sink` leading tokens always stay. `recent` trailing ones may.
- Rows that are not finite are left out of the mean.
"""

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.dynamic import DynamicState, dynamic_init
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.rescored import rescored_eviction
from velox_fn.engine.rows import Rows
from velox_fn.engine.scorers import MLX_SUMS, minus_cosine, unit_keys
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, static_eviction


def keydiff(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    rollback: int = 0,
    mean_keys: mx.array | None = None,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction:
    """The KeyDiff method: keep the keys that are least like the mean key.

    Source: arXiv:2504.15364, section 3.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        rollback: tokens that can be taken back after evictions; with `mean_keys` only.
        mean_keys: float32 [H,D], the calibrated mean key direction of each KV head.
        use_metal_kernels: for eviction; with `mean_keys` only. True or False; None uses them where they run.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction`: static with `mean_keys`, else scored anew with every call.

    Raises:
        ValueError: a count cannot work; `mean_keys` is not a finite 2-D array or is all zeros; or a rollback is asked
            for without it, since the running mean cannot be taken back.

    Example:
        >>> from velox_fn import keydiff
        >>> keydiff(budget=256).static
        False
    """
    if mean_keys is not None:
        checks.finite_matrix("mean_keys", mean_keys, "[n_kv_heads, head_dim]")
        checks.not_zero("mean_keys", mean_keys)
        method = static_eviction(
            "keydiff",
            _difference,
            budget=budget,
            n_sink=n_sink,
            recent=recent,
            rollback=rollback,
            use_metal_kernels=use_metal_kernels,
            params={"mean_keys": mean_keys},
        )
        return at_intervals(pinning(method, pinned), interval)
    if rollback:
        raise ValueError(f"rollback={rollback} needs mean_keys: without them every new key changes all scores")
    if use_metal_kernels:
        raise ValueError("use_metal_kernels=True needs mean_keys: without them rows are scored anew with every call")
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)

    settings = {"budget": budget, "n_sink": n_sink, "recent": recent}
    running = rescored_eviction("keydiff", dynamic_init(**settings), _running_difference, settings)
    return at_intervals(pinning(running, pinned), interval)


def _running_difference(state: DynamicState, landed: DynamicState, rows: Rows, n_tokens: int) -> mx.array:
    unit = unit_keys(rows.keys)
    counted = mx.isfinite(unit) & (select.rank_positions(rows.ranks) >= 0)[..., None]
    mean = mx.where(counted, unit, 0.0).sum(axis=2)  # times a number, which does not change the order
    return minus_cosine(rows.keys, mean, MLX_SUMS)


def _difference(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    return Scores(minus_cosine(keys, params[0], MLX_SUMS), unseen=(values,))

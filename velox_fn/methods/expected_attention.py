"""Expected Attention: keep the rows that future queries are expected to look at, weighted by their values.

Future queries are taken to be q ~ N(m, C), scaled as attention scales them. The expected attention to a key then has a
closed form, and a row scores

    s_i = E[exp(q . k_i)] |v_i| = exp(m . k_i + k_i^T C k_i / 2) |v_i|

up to the sum over the rows, which is the same for all of them. The logarithm of this is what is stored.

There are two forms:

- As in the paper, m and C come from the sequence's own queries so far. They are taken before RoPE, then turned by the
  rotation of RoPE averaged over the next `future` positions. Every query changes every score. A step costs n D^2 per
  head.
- With `query_mean` and `query_cov`, calibrated on text, m and C are fixed. A row is scored once, and the kept set does
  not depend on how tokens are split into calls.

Source: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution"
(arXiv:2510.00636), section 3.

Differs from the paper:

- `n_sink` leading tokens always stay. `recent` trailing ones may.
- The query heads of a group share one distribution. The paper averages their attention.
- All heads have one budget.
- Calibrated statistics are those of queries after RoPE, at the positions of the text. So are the sequence's own when
  `rope` is not given.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.attention import Observed, Queries, observe_rows
from velox_fn.engine.dynamic import dynamic_eviction, rescore
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.records import record
from velox_fn.engine.rope import RopeSpec, mean_rotation, rope_remap_positions, rope_spec, turn_by
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, static_eviction
from velox_fn.engine.store import Store, init_store
from velox_fn.engine.widening import widened

_PRODUCTS_AT_ONCE = 2**20  # bounds the products held at a time to that many per head


@record
class ExpectedAttentionState:
    """Rows, and sums over the queries of each KV head so far, those of the first `n_sink` tokens left out."""

    store: Store
    query_sum: mx.array  # float32 [B,H,D]
    query_gram: mx.array  # float32 [B,H,D,D]: sum of q q^T
    query_count: mx.array  # float32 [B]


def expected_attention(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    future: int = 512,
    rope: RopeSpec | Mapping[str, Any] | None = None,
    rollback: int = 0,
    query_mean: mx.array | None = None,
    query_cov: mx.array | None = None,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction:
    """The Expected Attention method: keep the rows that future queries are expected to look at.

    Source: arXiv:2510.00636, section 3.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        future: positions ahead that RoPE is averaged over, without a calibration.
        rope: the model's rotary embedding, without a calibration. `install` reads it.
        rollback: tokens that can be taken back after evictions; with calibrated moments only.
        query_mean: float32 [H,D], the calibrated mean of each KV head's queries, scaled as attention scales them.
        query_cov: float32 [H,D,D], their covariance.
        use_metal_kernels: for eviction; with calibrated moments only. True or False; None uses them where they run.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction`: static with calibrated moments, else one that scores by queries.

    Raises:
        ValueError: a count cannot work; the moments do not fit each other or are not finite; or a rollback is asked for
            without moments, since what a query added to the sums cannot be taken back.

    Example:
        >>> from velox_fn import expected_attention
        >>> expected_attention(budget=256).static
        False
    """
    future = checks.whole_number("future", future, 1)
    spec = None if rope is None else rope_spec(rope)
    settings = {"future": future, "rope": None if spec is None else spec.plain()}
    if query_mean is not None or query_cov is not None:
        method = static_eviction(
            "expected_attention",
            _calibrated_score,
            budget=budget,
            n_sink=n_sink,
            recent=recent,
            rollback=rollback,
            use_metal_kernels=use_metal_kernels,
            params=_checked_moments(query_mean, query_cov),
            settings=settings,
        )
        return at_intervals(pinning(method, pinned), interval)
    if rollback:
        raise ValueError(f"rollback={rollback} needs query_mean and query_cov: without them queries change all scores")
    if use_metal_kernels:
        raise ValueError(
            "use_metal_kernels=True needs query_mean and query_cov: without them rows are scored anew with every call"
        )
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> ExpectedAttentionState:
        return ExpectedAttentionState(
            store=init_store(
                batch, n_kv_heads, head_dim, value_dim, dtype, budget=budget, n_sink=n_sink, recent=recent
            ),
            query_sum=mx.zeros((batch, n_kv_heads, head_dim)),
            query_gram=mx.zeros((batch, n_kv_heads, head_dim, head_dim)),
            query_count=mx.zeros((batch,)),
        )

    def observe(
        state: ExpectedAttentionState,
        queries: Queries,
        scale: float | None = None,
        valid: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> ExpectedAttentionState:
        # Sinks are a term of the sum over the rows, which is the same for all of them.
        observed = observe_rows(state.store, queries, scale, valid)
        _check_space(observed)
        state = _with_queries(state, observed, spec)
        mean, covariance = _future_moments(state, future, spec)
        keys = widened(observed.rows.keys)
        logits = ((keys @ (0.5 * covariance) + mean[:, :, None]) * keys).sum(-1)
        scores = logits + _log_norms(observed.rows.values)
        return dataclasses.replace(state, store=rescore(state.store, observed, scores))

    settings = {"budget": budget, "n_sink": n_sink, "recent": recent, **settings}
    observing = dynamic_eviction("expected_attention", init, observe, settings)
    return at_intervals(pinning(observing, pinned), interval)


def _check_space(observed: Observed) -> None:
    """ValueError unless the queries are in the space of the stored keys, which they are projected on."""
    if observed.keys.shape[-1] != observed.rows.keys.shape[-1]:
        raise ValueError(
            f"expected_attention takes stored keys of {observed.rows.keys.shape[-1]} dimensions by the distribution of "
            f"the queries, which here have {observed.keys.shape[-1]}, for others that the model makes of the rows; use "
            "h2o, tova or snapkv, or queries='proxy'"
        )


def _log_norms(values: mx.array) -> mx.array:
    return 0.5 * mx.log(mx.square(widened(values)).sum(-1))  # a power would take ten times as long


def _calibrated_score(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    # No matrix product: its order of summation may depend on the number of rows, and then so would the kept set.
    mean, covariance = params
    exact = widened(keys)
    step = max(1, _PRODUCTS_AT_ONCE // keys.shape[-1] ** 2)
    parts = [exact[:, :, start : start + step] for start in range(0, keys.shape[2], step)]
    quadratic = [((part[..., None, :] * covariance[:, :, None]).sum(-1) * part).sum(-1) for part in parts]
    logits = (exact * mean[:, :, None]).sum(-1) + 0.5 * mx.concatenate(quadratic, axis=-1)
    return Scores(logits + _log_norms(values), unseen=())


def _with_queries(state: ExpectedAttentionState, observed: Observed, rope: RopeSpec | None) -> ExpectedAttentionState:
    positions = observed.query_positions
    counted = positions >= state.store.n_sink
    queries = observed.queries
    queries = queries.reshape(*state.query_sum.shape[:2], -1, *queries.shape[3:])  # keys may be there per query head
    if rope is not None:
        queries = rope_remap_positions(queries, positions[:, None, None], mx.array(0), rope)
    queries = mx.where(counted[:, None, None, :, None] & mx.isfinite(queries), queries, 0.0)
    flat = queries.flatten(2, 3)
    return dataclasses.replace(
        state,
        query_sum=state.query_sum + flat.sum(axis=2),
        query_gram=state.query_gram + flat.swapaxes(-1, -2) @ flat,
        query_count=state.query_count + counted.sum(axis=1) * queries.shape[2],
    )


def _future_moments(state: ExpectedAttentionState, future: int, rope: RopeSpec | None) -> tuple[mx.array, mx.array]:
    """Mean [B,H,D] and covariance [B,H,D,D] of the queries to come."""
    count = mx.maximum(state.query_count, 1)[:, None, None]
    mean = state.query_sum / count
    covariance = state.query_gram / count[..., None] - mean[..., None] * mean[..., None, :]
    if rope is None:
        return mean, covariance
    cos, sin = mean_rotation(state.store.offset, future, rope)
    mean = turn_by(mean, cos[:, None], sin[:, None], rope)
    for _ in range(2):  # both sides
        covariance = turn_by(covariance, cos[:, None, None], sin[:, None, None], rope).swapaxes(-1, -2)
    return mean, covariance


def _checked_moments(mean: mx.array | None, covariance: mx.array | None) -> dict[str, mx.array]:
    if mean is None or covariance is None:
        raise ValueError("query_mean and query_cov go together: give both, from one calibration, or neither")
    checks.finite_matrix("query_mean", mean, "[n_kv_heads, head_dim]")
    if covariance.shape != (*mean.shape, mean.shape[1]):
        raise ValueError(
            f"query_cov must be [n_kv_heads, head_dim, head_dim] = {(*mean.shape, mean.shape[1])} to fit query_mean, "
            f"got shape {tuple(covariance.shape)}"
        )
    checks.finite_matrix("query_cov", covariance.flatten(0, 1), "[n_kv_heads, head_dim, head_dim]")
    return {"query_mean": mean.astype(mx.float32), "query_cov": covariance.astype(mx.float32)}

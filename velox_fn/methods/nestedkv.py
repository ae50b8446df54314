"""NestedKV: keep the keys that are unlike the rest of the text, of their block, or of the tokens just before them.

With keys k of unit norm, row i of n has an anomaly at each of three scales: a_i = -cos(k_i, the mean key of

- stable: all rows;
- episodic: its block of clip(n / 32, 128, 256) rows;
- current: the 64 rows that end with it).

Each scale is brought to 0 ... 1 over a head's rows, and weighs in by how far apart its extremes are there:

    b_i = sum of w a_i,   w = softmax(log (0.4, 0.4, 0.2) + 3 (mean of the top tenth - mean of the bottom tenth))

Where scales disagree the largest counts. The surprise u_i is their deviation, brought to 0 ... 1, less its mean:

    s_i = (1 - g_i) b_i + g_i max over scales of a_i,   g_i = sigmoid(10 (u_i - 0.6))

Source: "NestedKV: Nested Memory Routing for Long-Context KV Cache Compression" (arXiv:2605.26678, version 1), sections
2.2 to 2.4; constants from appendix A. The paper's own text could not be had, nor code of its authors: the definition is
that of two summaries which quote it.

Differs from the paper:

- The paper cuts a prompt once. Here rows are scored anew whenever some leave, over those left: use an `interval`.
- Every head has the same budget, where the paper's heads compete for that of the layer (section 2.6).
- Keys that are not finite are left out of the means. A scale that varies by no more than rounding is 0.
"""

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.dynamic import DynamicState, dynamic_init
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.rescored import rescored_eviction
from velox_fn.engine.rows import Rows, rows_at, temporal_order
from velox_fn.engine.scorers import unit_keys

_WINDOW = 64
_PRIOR = (0.4, 0.4, 0.2)
_ROUNDING = 1e-5  # of a cosine to a sum of float32 keys


def nestedkv(
    *, budget: int = 512, n_sink: int = 4, recent: int = 0, interval: int = 1, pinned: Pinned = ()
) -> Eviction[DynamicState]:
    """The NestedKV method: keep the keys that are unlike the text, their block, or the tokens just before them.

    Source: arXiv:2605.26678, sections 2.2 to 2.4.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that needs neither queries nor a calibration.

    Raises:
        ValueError: a count cannot work.

    Example:
        >>> from velox_fn import nestedkv
        >>> nestedkv(budget=256, interval=128).needs_queries
        False
    """
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)

    settings = {"budget": budget, "n_sink": n_sink, "recent": recent}
    method = rescored_eviction("nestedkv", dynamic_init(**settings), _score, settings)
    return at_intervals(pinning(method, pinned), interval)


def _score(state: DynamicState, landed: DynamicState, rows: Rows, n_tokens: int) -> mx.array:
    order = temporal_order(rows.ranks)
    real = mx.take_along_axis(select.rank_positions(rows.ranks), order, axis=-1) >= 0
    return mx.take_along_axis(_in_order(rows_at(rows.keys, order), real), mx.argsort(order, axis=-1), axis=-1)


def _in_order(keys: mx.array, real: mx.array) -> mx.array:
    """float32 [B,H,n] of keys [B,H,n,D] in temporal order, of which those `real` come first."""
    unit = unit_keys(keys)
    counted = mx.isfinite(unit).all(-1) & real
    unit = mx.where(counted[..., None], unit, 0.0)
    sums = mx.pad(mx.cumsum(unit, axis=2), [(0, 0), (0, 0), (1, 0), (0, 0)])
    n_rows, place = real.sum(-1, keepdims=True), mx.arange(keys.shape[2])
    width = mx.clip(n_rows // 32, 128, 256)
    block = place // width * width
    spans = (
        (mx.zeros_like(block), mx.broadcast_to(n_rows, block.shape)),
        (block, mx.minimum(block + width, n_rows)),
        (mx.broadcast_to(mx.maximum(place + 1 - _WINDOW, 0), block.shape), mx.broadcast_to(place + 1, block.shape)),
    )
    anomalies = [-_cosines(unit, rows_at(sums, stop) - rows_at(sums, start)) for start, stop in spans]
    scales = _over_rows(mx.stack(anomalies), counted)  # [3,B,H,n]
    weights = mx.softmax(mx.log(mx.array(_PRIOR))[:, None, None, None] + 3 * _spread(scales, counted), axis=0)
    blend, strongest = (weights * scales).sum(0), scales.max(0)
    surprise = _over_rows(mx.std(scales, axis=0), counted)
    surprise = surprise - surprise.sum(-1, keepdims=True) / mx.maximum(counted.sum(-1, keepdims=True), 1)
    gate = mx.sigmoid(10 * (surprise - 0.6))
    return blend + gate * (strongest - blend)


def _cosines(unit: mx.array, sums: mx.array) -> mx.array:
    return (unit * sums).sum(-1) / mx.maximum(mx.sqrt(mx.square(sums).sum(-1)), _ROUNDING)


def _over_rows(numbers: mx.array, counted: mx.array) -> mx.array:
    """`numbers` [...,n] brought to 0 ... 1 over the rows that count; 0 in others."""
    least = mx.where(counted, numbers, mx.inf).min(-1, keepdims=True)
    span = mx.where(counted, numbers, -mx.inf).max(-1, keepdims=True) - least
    return mx.where(counted & (span > _ROUNDING), (numbers - least) / span, 0.0)


def _spread(scales: mx.array, counted: mx.array) -> mx.array:
    """The mean of the top tenth less that of the bottom tenth [...,1] of the rows that count."""
    n_counted, place = counted.sum(-1, keepdims=True), mx.arange(scales.shape[-1])
    tenth = mx.maximum(n_counted // 10, 1)
    sign = (place >= n_counted - tenth).astype(mx.float32) - (place < tenth)
    in_order = mx.sort(mx.where(counted, scales, mx.inf), axis=-1)
    return mx.where(place < n_counted, sign * in_order, 0.0).sum(-1, keepdims=True) / tenth

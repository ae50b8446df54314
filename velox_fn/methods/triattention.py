"""TriAttention: keep the keys that queries around calibrated centres will look at from where they will stand.

Before RoPE the queries of a head stay close to a centre. What a query at distance d from now will think of a key k is
a sum over the pairs f of dimensions that RoPE turns, as complex numbers before RoPE:

    S(k, d) = sum_f |E q_f| |k_f| cos(w_f (age + d) + arg(E q_f conj(k_f)))  +  sum_f (E |q_f| - |E q_f|) |k_f|

The score is the mean over the distances d = 1, 2, 4, ... 2^16 at which later queries may stand. Where query heads
share a KV head, the scores of each are brought to mean 0 and deviation 1 over the rows, and the largest counts.

The mean over d turns each centre once, so a cached key, which has turned already, needs one product with it.

Source: "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression" (arXiv:2604.04921), equations 6
to 13.

Differs from the paper:

- Rows leave with every call unless `interval` is given; the paper's is 128.
- `n_sink` leading tokens always stay. `recent` trailing ones may. Tokens of a prompt leave like others.
- Dimensions that RoPE does not turn play no part, as in the formula.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from velox_fn.engine import checks, select
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.records import record
from velox_fn.engine.rescored import rescored_eviction
from velox_fn.engine.rope import RopeSpec, pair_angles, rope_spec, rotary_pairs
from velox_fn.engine.rows import Rows
from velox_fn.engine.store import Store, init_store

_DISTANCES = 2.0 ** np.arange(17)


@record
class TriAttentionState:
    """Rows, and the centres with the rotations averaged over the distances."""

    store: Store
    centres: mx.array  # float32 [B,H,G,3,dims/2]: real and imaginary part of the turned E q_f, and E |q_f| - |E q_f|


def triattention(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    rope: RopeSpec | Mapping[str, Any] | None = None,
    query_centres: mx.array | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[TriAttentionState]:
    """The TriAttention method: keep the keys that queries around calibrated centres will look at.

    Source: arXiv:2604.04921, equations 6 to 13.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        rope: the model's rotary embedding. `install` reads it.
        query_centres: float32 [H,G,3,dims/2], of the queries of each of the G query heads of a KV head before RoPE: for
            each pair that turns the means of its two numbers and of its length. From a calibration.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that needs no queries. It cannot begin without `rope` and `query_centres`.

    Raises:
        ValueError: a count cannot work, or the centres are not finite or do not fit the rotary embedding.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import RopeSpec, triattention
        >>> triattention(budget=256, rope=RopeSpec(dims=64), query_centres=mx.ones((2, 3, 3, 32))).needs_queries
        False
    """
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    spec = RopeSpec(dims=0) if rope is None else rope_spec(rope)
    if query_centres is not None:
        _check_centres(query_centres, spec)

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> TriAttentionState:
        if spec.dims == 0 or query_centres is None:
            raise ValueError(
                "triattention needs rope and query_centres: run `velox calibrate`, and give what it makes as "
                "calibration= to install, which reads the rotary embedding from the model, or --calibration"
            )
        if query_centres.shape[0] != n_kv_heads or spec.first + spec.dims > head_dim:
            raise ValueError(
                f"query_centres must be [n_kv_heads,G,3,dims/2] for {n_kv_heads} KV heads of width {head_dim} for this "
                f"layer, got shape {tuple(query_centres.shape)}; calibrate this model"
            )
        store = init_store(batch, n_kv_heads, head_dim, value_dim, dtype, budget=budget, n_sink=n_sink, recent=recent)
        centres = _turned_ahead(query_centres, spec)
        return TriAttentionState(store=store, centres=mx.broadcast_to(centres, (batch, *centres.shape)))

    def score(state: TriAttentionState, landed: TriAttentionState, rows: Rows, n_tokens: int) -> mx.array:
        first, second = rotary_pairs(rows.keys, spec)
        of_keys = mx.concatenate([first, second, mx.sqrt(first * first + second * second)], axis=-1)
        angles = (landed.store.offset - 1)[:, None].astype(mx.float32) * pair_angles(spec)  # of the newest token
        cos, sin = (turn(angles)[:, None, None] for turn in (mx.cos, mx.sin))
        real, imaginary, beside = (state.centres[..., part, :] for part in range(3))
        centres = mx.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos, beside], axis=-1)
        by_head = centres @ of_keys.swapaxes(-1, -2)  # [B,H,G,n]
        counted = mx.isfinite(by_head) & (select.rank_positions(rows.ranks) >= 0)[:, :, None]
        n_rows = mx.maximum(counted.sum(-1, keepdims=True), 1)
        off = by_head - mx.where(counted, by_head, 0.0).sum(-1, keepdims=True) / n_rows
        variance = mx.where(counted, off * off, 0.0).sum(-1, keepdims=True) / n_rows
        standard: mx.array = off / mx.sqrt(mx.where(variance > 0, variance, 1.0))
        return standard.max(2)

    settings = {"budget": budget, "n_sink": n_sink, "recent": recent, "rope": None if rope is None else spec.plain()}
    params = {} if query_centres is None else {"query_centres": query_centres}
    method = rescored_eviction("triattention", init, score, settings, params)
    return at_intervals(pinning(method, pinned), interval)


def _turned_ahead(centres: mx.array, rope: RopeSpec) -> mx.array:
    """Centres [H,G,3,dims/2] turned by the mean of the rotations by each distance, and what |k_f| counts beside."""
    # In float64, and not by `pair_angles`: float32 is off by thousandths of a radian at 2^16 positions.
    periods = rope.base ** (np.arange(0, rope.dims, 2) / rope.dims) if rope.freqs is None else rope.freqs
    mean = np.exp(1j * rope.scale * np.outer(_DISTANCES, np.divide(1.0, periods))).mean(0)
    cos, sin = (mx.array(part.astype(np.float32)) for part in (mean.real, mean.imag))
    real, imaginary, length = (centres[:, :, part].astype(mx.float32) for part in range(3))
    beside = length - mx.sqrt(real * real + imaginary * imaginary)
    return mx.stack([real * cos - imaginary * sin, real * sin + imaginary * cos, beside], axis=2)


def _check_centres(centres: mx.array, rope: RopeSpec) -> None:
    pairs = rope.dims // 2 or "dims/2"
    if not isinstance(centres, mx.array) or centres.ndim != 4 or centres.shape[2] != 3:
        given = tuple(centres.shape) if isinstance(centres, mx.array) else type(centres).__name__
        raise ValueError(f"query_centres must be [n_kv_heads,G,3,{pairs}], got {given}; calibrate this model")
    if rope.dims and centres.shape[3] != pairs:
        raise ValueError(
            f"query_centres must have {pairs} pairs, as many as RoPE turns, got shape {tuple(centres.shape)}; both "
            "come from one model"
        )
    checks.finite_matrix("query_centres", centres.reshape(-1, centres.shape[3]), "[n_kv_heads,G,3,dims/2]")

"""Evict a whole block at once: with MLX operations, or with the fused Metal kernels where there is Metal."""

import mlx.core as mx

from metal_src import evict_apply, kernel_failure, metal_available, threshold_and_quota
from velox_fn.engine import checks, select
from velox_fn.engine.half import Half
from velox_fn.engine.rows import rows_at


def resolve_metal(use_metal_kernels: bool | None) -> bool:
    """Whether to use the Metal kernels: None where they compile and run, True always, False never.

    Where there is an Apple GPU and they do not run, None takes MLX operations; `kernel_failure` has warned once.
    Raises ValueError when they are asked for and cannot run here.
    """
    if use_metal_kernels is False:
        return False
    if not metal_available():
        if use_metal_kernels is None:
            return False
        raise ValueError(
            "use_metal_kernels=True needs MLX on an Apple GPU as the default device, and there is none here; leave it "
            "at None to use the kernels where they can run"
        )
    failure = kernel_failure()
    if failure is not None and use_metal_kernels:
        raise ValueError(f"use_metal_kernels=True, but the Metal kernels do not run here: {failure}")
    return failure is None


def fused_evict(
    keys: mx.array,
    values: mx.array,
    scores: mx.array,
    positions: mx.array,
    *,
    budget: int,
    n_sink: int = 0,
    recent: int = 0,
    offset: mx.array | None = None,
    use_metal_kernels: bool | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The `budget` rows that the selection rule keeps, in the order they came.

    Sinks (position < n_sink) and the recent window (position >= offset - recent) always stay. A score that is not
    finite loses. Both backends give the same bits for the same scores.

    Args:
        keys: [B,H,n,D].
        values: [B,H,n,D_v].
        scores: float32 [B,H,n].
        positions: int32 [B,H,n], ascending over the real rows, -1 for padding.
        budget: rows to keep, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        offset: int32 [B], tokens seen. Needed when recent > 0.
        use_metal_kernels: True or False; None uses them where they run.

    Returns:
        Keys, values, scores and positions of the min(budget, n) survivors. Keys and values are copied bit for bit.
        Padding comes last; no row moves when all survive.

    Raises:
        ValueError: shapes, dtypes or counts do not fit, or Metal is required and missing.
    """
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    if scores.shape != keys.shape[:3] or positions.shape != keys.shape[:3] or values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"keys {tuple(keys.shape)}, values {tuple(values.shape)}, scores {tuple(scores.shape)} and positions "
            f"{tuple(positions.shape)} must agree in [B,H,n]"
        )
    if scores.dtype != mx.float32 or positions.dtype != mx.int32:
        raise ValueError(f"scores must be float32 and positions int32, got {scores.dtype} and {positions.dtype}")
    if recent > 0 and (not isinstance(offset, mx.array) or offset.shape != keys.shape[:1]):
        raise ValueError(f"recent={recent} needs offset, the tokens seen by each sequence, int32 [{keys.shape[0]}]")
    metal = resolve_metal(use_metal_kernels)
    if budget >= keys.shape[2]:
        return keys, values, scores, positions
    sound = mx.where(mx.isfinite(scores), scores, -mx.inf)
    sound = mx.where((positions >= 0) & (positions < n_sink), mx.inf, sound)
    ranks = select.pack_ranks(sound, positions)
    competing = ranks if offset is None else select.competing_ranks(ranks, offset, recent)
    if metal:
        return _applied(keys, values, scores, positions, competing, budget)
    index = select.survivors(competing, budget)
    return (
        rows_at(keys, index),
        rows_at(values, index),
        mx.take_along_axis(scores, index, axis=2),
        mx.take_along_axis(positions, index, axis=2),
    )


def evict_rows(
    keys: Half, values: Half, ranks: mx.array, competing: mx.array, keep: int, room: int, *, metal: bool
) -> tuple[Half, Half, mx.array]:
    """`fused_evict` of rows with ranks int64 [B,H,n] that compete as `competing`; Metal wants arrays in temporal order.

    Returns keys, values and ranks of `keep` rows, and from MLX operations `room` more, which hold nothing of use.
    """
    if metal:
        scores, positions = select.rank_scores(ranks), select.rank_positions(ranks)
        keys, values, scores, positions = _applied(keys, values, scores, positions, competing, keep)
        return keys, values, select.pack_ranks(scores, positions)
    index = select.survivors(competing, keep)
    # Room costs almost nothing here. Made for the next token, it would cost a copy of all rows.
    index = mx.concatenate([index, mx.repeat(index[..., -1:], room, axis=-1)], axis=-1)
    return (
        rows_at(keys, index),
        rows_at(values, index),
        mx.take_along_axis(ranks, index, axis=2),
    )


def _applied(
    keys: mx.array, values: mx.array, scores: mx.array, positions: mx.array, competing: mx.array, keep: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    effective = select.rank_scores(competing)
    cut = threshold_and_quota(effective, positions, keep)
    return evict_apply(keys, values, scores, effective, positions, cut, keep=keep)

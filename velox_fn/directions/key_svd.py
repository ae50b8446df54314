"""The key-SVD fallback: the filter direction that is left when there are no query activations."""

import dataclasses

import mlx.core as mx

from velox_fn.engine import select
from velox_fn.engine.landing import land, settle, tied
from velox_fn.engine.rows import Rows, View, arriving_positions, gather_rows, in_temporal_order, temporal_order
from velox_fn.engine.static import RowScores
from velox_fn.engine.store import Store, check_block, competing, used_rows


def estimate_filter_dir(keys: mx.array) -> mx.array:
    """Leading axis of variation of keys.

    The top right singular vector of the mean-centred keys, by `eigh` of their Gram matrix in float64. This is not the
    paper's filter (arXiv:2503.02812 uses queries). It finds an axis, and not which end of it matters: its sign says
    nothing. The entry of largest magnitude is made positive, so that the result does not depend on the LAPACK in use.
    Centring removes a pure drift, and with it all that such a head could tell.

    Rows with a NaN or infinite entry are left out. Keys that do not vary, or none that are finite, give an arbitrary
    but finite unit vector. So this never raises for what keys hold, and never waits for them.

    Args:
        keys: [...,N,D], any float dtype.

    Returns:
        A unit vector, float32 [...,D].

    Raises:
        ValueError: keys have fewer than two dimensions, or N or D is 0.
    """
    if keys.ndim < 2 or 0 in keys.shape[-2:]:
        raise ValueError(f"keys must be [...,N,D] with N and D at least 1, got {tuple(keys.shape)}")
    with mx.stream(mx.cpu):
        rows = keys.astype(mx.float64)
        finite = mx.isfinite(rows).all(-1, keepdims=True)
        zero = mx.zeros((), mx.float64)
        rows = mx.where(finite, rows, zero)
        n_finite = mx.maximum(finite.sum(-2, keepdims=True), 1).astype(mx.float64)
        centred = mx.where(finite, rows - rows.sum(-2, keepdims=True) / n_finite, zero)
        # One memory layout, whatever view the keys came in, so that the product sums in one order.
        centred = mx.contiguous(centred)
        _, axes = mx.linalg.eigh(centred.swapaxes(-1, -2) @ centred)
        leading = axes[..., -1]  # eigh sorts ascending
        largest = mx.take_along_axis(leading, mx.abs(leading).argmax(-1, keepdims=True), axis=-1)
        return mx.where(largest < 0, -leading, leading).astype(mx.float32)


def warm_up(
    store: Store,
    filters: mx.array,
    keys: mx.array,
    values: mx.array,
    valid: mx.array | None,
    score: RowScores,
    calib_tokens: int,
) -> tuple[Store, mx.array, View]:
    """One update of the fallback until every sequence has its filter.

    A filter float32 [B,H,D] is estimated from exactly a sequence's first `calib_tokens` keys. So it does not depend on
    how they were split into calls. All stored rows are then scored, and the store is cut down to its budget.

    The sequences of a ragged batch freeze one by one. Until the last one has, those that froze earlier give up what
    exceeds the budget by turning it into padding.
    """
    check_block(store, keys, values, valid)
    n_tokens = keys.shape[2]
    positions = arriving_positions(store.offset, n_tokens, valid)
    none_yet = select.Scores(mx.zeros(keys.shape[:3], mx.float32), unseen=(keys, values))
    ranks = select.arrival_ranks(none_yet, positions, store.staying)
    landed, view = land(store, Rows(keys=keys, values=values, ranks=ranks), valid)
    may_freeze = landed.filled >= calib_tokens
    if may_freeze or keys.shape[0] > 1:  # in a batch, a sequence that froze before may have few rows
        ready = landed.offset >= calib_tokens
        if may_freeze:
            fresh = ready & (store.offset < calib_tokens)
            filters = mx.where(fresh[:, None, None], _estimate(landed, calib_tokens), filters)
        landed = _rescored(landed, filters, score)
        if landed.warming_up:
            landed = _within_budget(settle(landed, n_tokens), ready)
    settled = settle(landed, n_tokens)
    keys_view, values_view = mx.depends(list(tied(view, settled)), [filters])
    return settled, filters, (keys_view, values_view)


def _estimate(store: Store, calib_tokens: int) -> mx.array:
    used = used_rows(store)
    first = temporal_order(used.ranks)[..., :calib_tokens]
    return estimate_filter_dir(gather_rows(used, first).keys)


def _rescored(store: Store, filters: mx.array, score: RowScores) -> Store:
    used = used_rows(store)
    positions = select.rank_positions(used.ranks)
    scores = score(used.keys, used.values, positions, (filters,))
    ranks = select.arrival_ranks(scores, positions, store.staying)
    return dataclasses.replace(store, keys=used.keys, values=used.values, ranks=ranks)


def _within_budget(store: Store, ready: mx.array) -> Store:
    """`store` with all but the best `budget` rows of each `ready` sequence turned into padding, which comes last.

    Every head then has its padding at the same rows, as one mask for all heads needs.
    """
    surplus = store.filled - store.budget
    if surplus <= 0:
        return store
    used = used_rows(store)
    ranks = competing(store, used.ranks, store.recent)
    lost = ready[:, None, None] & (ranks < mx.partition(ranks, surplus, axis=-1)[..., surplus, None])
    demoted = Rows(
        keys=mx.where(lost[..., None], 0, used.keys),
        values=mx.where(lost[..., None], 0, used.values),
        ranks=mx.where(lost, select.PADDING, used.ranks),
    )
    kept = in_temporal_order(demoted)
    return dataclasses.replace(store, keys=kept.keys, values=kept.values, ranks=kept.ranks, ordered=False)

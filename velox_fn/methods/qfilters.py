"""Q-Filters: keep the keys that project highest onto the direction in which a head's queries drift.

A row scores sign * <f_h, k>, where f_h is the head's filter, calibrated offline from queries (`compute_qfilters`, paper
equation 1).

Source: "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression" (arXiv:2503.02812), section 3.2.

Differs from the paper:

- `n_sink` leading tokens always stay. `recent` trailing ones may.
- A block is evicted from once, after it has attended. The kept set is the same however the text is split.
- Without calibrated filters the direction is estimated from the first `calib_tokens` keys. That finds an axis, but not
  which end of it matters: the sign of this fallback is arbitrary, and `sign=-1` is a real alternative there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from velox_fn.directions.key_svd import warm_up
from velox_fn.engine import checks
from velox_fn.engine.appending import room
from velox_fn.engine.eviction import Eviction, Init
from velox_fn.engine.interval import at_intervals, begun_at_intervals, interval_update
from velox_fn.engine.pinned import Pinned, pinned_state, pinning
from velox_fn.engine.records import record, replaced
from velox_fn.engine.rows import View
from velox_fn.engine.scorers import metal_projection, projection_terms
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, RowScores, per_row, scored, static_ranks, static_update
from velox_fn.engine.store import Store, init_store


@record
class QFiltersState:
    """Rows and the filters that score them."""

    store: Store
    filters: mx.array  # float32 [B,H,D], unit norm; zeros where the fallback has not frozen one yet
    sign: int  # +1: high projections stay; -1: low ones
    calib_tokens: int  # keys that the fallback estimates a filter from; 0 with calibrated filters

    @property
    def frozen(self) -> bool:
        """Whether every sequence has its filter."""
        return self.store.seen_by_all >= self.calib_tokens


def qfilters_init(
    batch: int,
    n_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: mx.Dtype = mx.float32,
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    sign: int = 1,
    calib_tokens: int = 128,
    filters: mx.array | None = None,
    rollback: int = 0,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> QFiltersState:
    """An empty state.

    Args:
        batch: sequences in lockstep.
        n_kv_heads: H, KV heads of the layer.
        head_dim: D, the width of keys.
        value_dim: D_v, the width of values. None is D.
        dtype: of the rows: float32, float16 or bfloat16.
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        sign: 1 keeps high projections, -1 low ones.
        calib_tokens: keys that the fallback estimates a filter from. Until then every row stays, over budget too.
        filters: float32 [H,D]. None takes the fallback.
        rollback: tokens that can be taken back after evictions.
        use_metal_kernels: True or False; None uses them where they run.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Raises:
        ValueError: a count cannot work, the sign is not 1 or -1, or filters are not finite, do not fit the heads, or
            are zero for one of them.
    """
    if filters is not None:
        checks.finite_matrix("filters", filters, "[n_kv_heads, head_dim]")
        checks.not_zero("filters", filters, axis=1)
    state = _init(
        batch,
        n_kv_heads,
        head_dim,
        value_dim,
        dtype,
        sign=sign,
        calib_tokens=calib_tokens,
        filters=filters,
        budget=budget,
        n_sink=n_sink,
        recent=recent,
        rollback=rollback,
        use_metal_kernels=use_metal_kernels,
    )
    begun: QFiltersState = begun_at_intervals(pinned_state(state, pinned), interval)
    return begun


def _init(
    batch: int,
    n_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: mx.Dtype = mx.float32,
    *,
    sign: int,
    calib_tokens: int,
    filters: mx.array | None,
    **limits: Any,
) -> QFiltersState:
    # Looks at no array, so that a cache that begins does not wait for the device.
    sign = checks.whole_number("sign", sign, -1)
    checks.one_of("sign", sign, (1, -1))
    calib_tokens = checks.whole_number("calib_tokens", calib_tokens, 2)
    store = init_store(batch, n_kv_heads, head_dim, value_dim, dtype, **limits)
    if filters is None:
        return QFiltersState(
            store=dataclasses.replace(store, warm_up=calib_tokens),
            filters=mx.zeros((batch, n_kv_heads, head_dim), mx.float32),
            sign=sign,
            calib_tokens=calib_tokens,
        )
    checks.fits_heads("filters", filters, n_kv_heads, head_dim)
    return QFiltersState(store=store, filters=per_row(filters.astype(mx.float32), batch), sign=sign, calib_tokens=0)


def qfilters_update(
    state: QFiltersState,
    keys: mx.array,
    values: mx.array,
    *,
    queries: mx.array | None = None,
    valid: mx.array | None = None,
) -> tuple[QFiltersState, View]:
    """Take a block of S tokens in and evict down to the budget. See `eviction.Update`.

    Args:
        state: of `qfilters_init` or an earlier update.
        keys: [B,H,S,D].
        values: [B,H,S,D_v].
        queries: not used.
        valid: int32 [B], the real tokens of each sequence. None: all are real.

    Returns:
        The next state, and the view: the rows kept before the call, followed by the block.

    Raises:
        ValueError: the block does not fit the state.
    """
    if state.store.span is not None:
        return interval_update(_AT_ONCE, state, keys, values, valid=valid)
    return _update(state, keys, values, valid=valid)


def _update(
    state: QFiltersState,
    keys: mx.array,
    values: mx.array,
    *,
    queries: mx.array | None = None,
    valid: mx.array | None = None,
) -> tuple[QFiltersState, View]:
    score = _SCORES[state.store.metal, state.sign]
    if state.frozen:
        store, view = static_update(state.store, keys, values, score, (state.filters,), valid)
        return replaced(state, store=store), view
    store, filters, view = warm_up(state.store, state.filters, keys, values, valid, score, state.calib_tokens)
    return replaced(state, store=store, filters=filters), view


def qfilters(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    sign: int = 1,
    calib_tokens: int = 128,
    filters: mx.array | None = None,
    rollback: int = 0,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[QFiltersState]:
    """The Q-Filters method: keep the keys that project highest onto their head's filter.

    Arguments and errors are those of `qfilters_init`.

    Source: arXiv:2503.02812, section 3.2.

    Returns:
        A static `Eviction`.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import qfilters
        >>> method = qfilters(budget=256, filters=mx.ones((2, 8)))
        >>> state = method.init(batch=1, n_kv_heads=2, head_dim=8)
        >>> state, view = method.update(state, mx.ones((1, 2, 300, 8)), mx.ones((1, 2, 300, 8)))
        >>> state.store.offset.item()
        300
    """
    settings: dict[str, Any] = {
        "budget": budget,
        "n_sink": n_sink,
        "recent": recent,
        "rollback": rollback,
        "sign": sign,
        "calib_tokens": calib_tokens,
    }
    n_kv_heads, head_dim = 1, 1
    if filters is not None:
        checks.finite_matrix("filters", filters, "[n_kv_heads, head_dim]")
        checks.not_zero("filters", filters, axis=1)
        n_kv_heads, head_dim = filters.shape
    init: Init = functools.partial(_init, **settings, filters=filters, use_metal_kernels=use_metal_kernels)
    init(1, n_kv_heads, head_dim)  # refuses settings that cannot work
    params = {} if filters is None else {"filters": filters}
    method = Eviction(init, _update, "qfilters", settings, params, scored=_scored, arrival=_arrival, appends=_appends)
    return at_intervals(pinning(method, pinned), interval)


def _scored(state: QFiltersState) -> QFiltersState:
    score = _SCORES[state.store.metal, state.sign]
    return replaced(state, store=scored(state.store, score, (state.filters,)))


def _appends(state: QFiltersState) -> int:
    return room(state.store) if state.frozen else 0


def _arrival(state: QFiltersState, keys: mx.array, values: mx.array, valid: mx.array | None) -> mx.array:
    score = _SCORES[state.store.metal, state.sign]
    return static_ranks(state.store, keys, values, score, (state.filters,), valid)


def _projection(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    return Scores(projection_terms(keys, params[0]), unseen=(values,))


def _metal_projection(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    return Scores(metal_projection(keys, values, params[0], positions), unseen=())


def _negated(score: RowScores) -> RowScores:
    def negated(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
        scores = score(keys, values, positions, params)
        return dataclasses.replace(scores, terms=-scores.terms)

    return negated


_SCORES: Mapping[tuple[bool, int], RowScores] = MappingProxyType(
    {
        (False, 1): _projection,
        (False, -1): _negated(_projection),
        (True, 1): _metal_projection,
        (True, -1): _negated(_metal_projection),
    }
)
_AT_ONCE = Eviction(qfilters_init, _update, "qfilters", {})
"""The method without an interval, which is given each whole interval as one block."""

"""The engine of the static methods: a row is scored once, when it arrives, from the row alone.

Scores are frozen and the selection rule is a total order, so the kept set is the same however the tokens are split
into calls, bit for bit, as long as a row's score does not depend on the split either: a score function must sum in an
order that the number of tokens in the call cannot change.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.fused_evict import resolve_metal
from velox_fn.engine.landing import append_unscored, land, overwrite_victim, puts_off, settle, tied, written
from velox_fn.engine.records import record, replaced
from velox_fn.engine.rows import Rows, View, arriving_positions
from velox_fn.engine.select import Scores, arrival_ranks
from velox_fn.engine.store import Store, check_block, init_store, overwrites

Params = tuple[mx.array, ...]
Score = Callable[[mx.array, mx.array, mx.array, Params], Scores]
"""(keys [B,H,S,D], values [B,H,S,D_v], positions int32 [B,1,S], params) -> scores"""


@record
class StaticState:
    """The state of a static method that holds nothing but rows and fixed parameters."""

    store: Store
    params: Params  # each with the batch as first axis


def static_update(
    store: Store,
    keys: mx.array,
    values: mx.array,
    score: Score,
    params: Params = (),
    valid: mx.array | None = None,
) -> tuple[Store, View]:
    """Take a block in and evict down to the budget."""
    check_block(store, keys, values, valid)
    n_tokens = keys.shape[2]
    if valid is None and puts_off(store, n_tokens):
        return append_unscored(store, keys, values)
    store = scored(store, score, params)
    if valid is None and overwrites(store, n_tokens):
        step = _compiled_step(score, store.n_sink, store.recent)
        k, v, ranks, offset = step(store.keys, store.values, store.ranks, store.offset, keys, values, *params)
        seen = store.seen_by_all + 1
        return replaced(store, keys=k, values=v, ranks=ranks, offset=offset, ordered=False, seen_by_all=seen), (k, v)
    if valid is None and n_tokens == 1:
        ranks = _compiled_ranks(score, store.n_sink)(store.offset, keys, values, *params)
    else:
        ranks = _ranks(score, store.n_sink, arriving_positions(store.offset, n_tokens, valid), keys, values, *params)
    landed, view = land(store, Rows(keys=keys, values=values, ranks=ranks), valid)
    settled = settle(landed, n_tokens)
    return settled, tied(view, settled)


def scored(store: Store, score: Score, params: Params) -> Store:
    """`store` with ranks on the rows that came without: the same bits as if each had been scored when it came."""
    n_rows = store.unscored
    if n_rows == 0:
        return store
    start = store.filled - n_rows
    keys, values = store.keys[:, :, start : store.filled], store.values[:, :, start : store.filled]
    positions = arriving_positions(store.offset - n_rows, n_rows, None)
    ranks = _ranks(score, store.n_sink, positions, keys, values, *params)
    return replaced(store, ranks=written(store.ranks, ranks, start), unscored=0)


def _ranks(
    score: Score, n_sink: int, positions: mx.array, keys: mx.array, values: mx.array, *params: mx.array
) -> mx.array:
    return arrival_ranks(score(keys, values, positions, params), positions, n_sink)


@functools.cache
def _compiled_ranks(score: Score, n_sink: int) -> Callable[..., mx.array]:
    """The ranks of one token as a compiled function of (offset, keys, values, *params)."""

    def ranks(offset: mx.array, keys: mx.array, values: mx.array, *params: mx.array) -> mx.array:
        return _ranks(score, n_sink, offset[:, None, None], keys, values, *params)

    return mx.compile(ranks)


@functools.cache
def _compiled_step(score: Score, n_sink: int, recent: int) -> Callable[..., tuple[mx.array, ...]]:
    """One token over budget as one compiled function of arrays: it traces once per shape, never per step."""

    def step(
        keys: mx.array, values: mx.array, ranks: mx.array, offset: mx.array, k: mx.array, v: mx.array, *params: mx.array
    ) -> tuple[mx.array, ...]:
        block = Rows(keys=k, values=v, ranks=_ranks(score, n_sink, offset[:, None, None], k, v, *params))
        keys, values, ranks = overwrite_victim(keys, values, ranks, offset, block, recent)
        offset = offset + 1
        (values,) = mx.depends([values], [ranks, offset])  # as in landing.tied
        return keys, values, ranks, offset

    return mx.compile(step)


def static_eviction(
    name: str,
    score: Score,
    *,
    budget: int,
    n_sink: int,
    recent: int,
    rollback: int = 0,
    use_metal_kernels: bool | None = None,
    params: Mapping[str, mx.array] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Eviction:
    """A method that is nothing but a score function.

    `params`, name to array per KV head: `score` sees them in this order, an array [H,D,...] as [B,H,D,...] and an array
    [H] as [B,H,1].
    `settings` holds what the method has beside the row counts.
    """
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    rollback = checks.whole_number("rollback", rollback, 0)
    params = params or {}
    limits = {"budget": budget, "n_sink": n_sink, "recent": recent, "rollback": rollback}

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> StaticState:
        store = init_store(batch, n_kv_heads, head_dim, value_dim, dtype, **limits, use_metal_kernels=use_metal_kernels)
        for param, array in params.items():
            checks.fits_heads(param, array, n_kv_heads, head_dim)
        return StaticState(store=store, params=tuple(per_row(array, batch) for array in params.values()))

    def update(
        state: StaticState,
        keys: mx.array,
        values: mx.array,
        *,
        queries: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[StaticState, View]:
        store, view = static_update(state.store, keys, values, score, state.params, valid)
        return replaced(state, store=store), view

    resolve_metal(use_metal_kernels)

    def all_scored(state: StaticState) -> StaticState:
        return replaced(state, store=scored(state.store, score, state.params))

    return Eviction(init, update, name, {**limits, **(settings or {})}, params, scored=all_scored)


def per_row(array: mx.array, batch: int) -> mx.array:
    """`array` [H,...] repeated along a new batch axis in front; [B,H,1] of an array [H]."""
    array = array[:, None] if array.ndim == 1 else array
    return mx.broadcast_to(array, (batch, *array.shape))

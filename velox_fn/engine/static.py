"""The engine of the static methods: a row is scored once, when it arrives, from the row alone.

Scores are frozen and the selection rule is a total order, so the kept set is the same however the tokens are split
into calls, bit for bit, as long as a row's score does not depend on the split either. That is what the contract of a
score function asks for (`static_eviction`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.appending import append, room
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.fused_evict import resolve_metal
from velox_fn.engine.half import Half, cut, depending
from velox_fn.engine.landing import (
    GROWTH,
    STEPS_KEPT,
    land,
    overwrite_victim,
    settle,
    tied,
    window,
    written,
)
from velox_fn.engine.records import record, replaced
from velox_fn.engine.rows import Rows, View, arriving_positions
from velox_fn.engine.select import Scores, arrival_ranks
from velox_fn.engine.store import Store, check_block, init_store, overwrites

Params = tuple[mx.array, ...]
Score = Callable[[mx.array, mx.array, mx.array, Params], Scores | mx.array]
"""(keys [B,H,S,D], values [B,H,S,D_v], positions int32 [B,1,S], params) -> float32 [B,H,S], or `Scores`"""
RowScores = Callable[[mx.array, mx.array, mx.array, Params], Scores]
"""The fast form alone, for scores that others are made of."""


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
    if valid is None and n_tokens == 1 and room(store) > 0:
        return append(store, keys, values)
    store = scored(store, score, params)
    if valid is None and overwrites(store, n_tokens):
        held = (store.keys, store.values, store.ranks, store.offset)
        counts = (mx.array(store.staying, mx.int32), *window(store.recent))
        row = store.widths.stored(keys, values)
        k, v, ranks, offset = _compiled_step(score)(held, (keys, values), row, counts, params)
        seen = store.seen_by_all + 1
        return replaced(store, keys=k, values=v, ranks=ranks, offset=offset, ordered=False, seen_by_all=seen), (k, v)
    ranks = static_ranks(store, keys, values, score, params, valid)
    landed, view = land(store, Rows(keys=keys, values=values, ranks=ranks), valid)
    settled = settle(landed, n_tokens)
    return settled, tied(view, settled)


def static_ranks(
    store: Store,
    keys: mx.array,
    values: mx.array,
    score: Score,
    params: Params = (),
    valid: mx.array | None = None,
) -> mx.array:
    """The ranks int64 [B,H,S] of a block that arrives."""
    n_tokens = keys.shape[2]
    if valid is None and n_tokens <= GROWTH:
        return _compiled_ranks(score)(store.offset, keys, values, mx.array(store.staying, mx.int32), *params)
    return _ranks(score, store.staying, arriving_positions(store.offset, n_tokens, valid), keys, values, *params)


def scored(store: Store, score: Score, params: Params) -> Store:
    """`store` with ranks on the rows that came without: the same bits as if each had been scored when it came."""
    n_rows = store.unscored
    if n_rows == 0:
        return store
    start = store.filled - n_rows
    keys, values = cut(store.keys, start, store.filled), cut(store.values, start, store.filled)
    positions = arriving_positions(store.offset - n_rows, n_rows, None)
    ranks = _ranks(score, store.staying, positions, keys, values, *params)
    return replaced(store, ranks=written(store.ranks, ranks, start), unscored=0)


def _ranks(
    score: Score, staying: int | mx.array, positions: mx.array, keys: mx.array, values: mx.array, *params: mx.array
) -> mx.array:
    return arrival_ranks(_checked(score(keys, values, positions, params), keys, values), positions, staying)


def _checked(scores: Scores | mx.array, keys: mx.array, values: mx.array) -> Scores:
    """Scores of a block; given an array alone, both halves are searched for rows that are not finite."""
    if isinstance(scores, Scores):
        return scores
    if not isinstance(scores, mx.array) or scores.dtype != mx.float32 or scores.shape != keys.shape[:3]:
        given = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, mx.array) else type(scores).__name__
        raise ValueError(
            f"a score function must return float32 [B,H,S] = {tuple(keys.shape[:3])}, one score for each row, or "
            f"Scores, got {given}"
        )
    return Scores(scores, unseen=(keys, values))


@functools.lru_cache(STEPS_KEPT)
def _compiled_ranks(score: Score) -> Callable[..., mx.array]:
    """The ranks of a few tokens as a compiled function of (offset, keys, values, staying, *params).

    Their cost is the number of kernels.
    """

    def ranks(offset: mx.array, keys: mx.array, values: mx.array, staying: mx.array, *params: mx.array) -> mx.array:
        return _ranks(score, staying, arriving_positions(offset, keys.shape[2], None), keys, values, *params)

    return mx.compile(ranks)


@functools.lru_cache(STEPS_KEPT)
def _compiled_step(score: Score) -> Callable[..., tuple[Any, ...]]:
    """One token over budget as one compiled function of arrays: it traces once per shape, never per step.

    Its arguments: keys, values, ranks and offset of the store; key and value of the token, as they came and as they are
    stored; `staying` and `window`; params.
    """

    def step(
        held: tuple[Half, ...], token: Params, row: tuple[Half, Half], counts: Params, params: Params
    ) -> tuple[Any, ...]:
        keys, values, ranks, offset = held
        (k, v), (staying, *recent) = token, counts
        own = _ranks(score, staying, offset[:, None, None], k, v, *params)
        block = Rows(keys=row[0], values=row[1], ranks=own)
        keys, values, ranks = overwrite_victim(keys, values, ranks, offset, block, *recent)
        offset = offset + 1
        return keys, depending(values, [ranks, offset]), ranks, offset  # as in landing.tied

    return mx.compile(step)


def static_eviction(
    name: str,
    score: Score,
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int | None = None,
    rollback: int | None = None,
    use_metal_kernels: bool | None = None,
    params: Mapping[str, mx.array] | None = None,
    value_params: Sequence[str] = (),
    numbers: Sequence[float | mx.array] = (),
    settings: Mapping[str, Any] | None = None,
) -> Eviction[StaticState]:
    """A method that is nothing but a score function.

        score(keys [B,H,S,D], values [B,H,S,D_v], positions int32 [B,1,S], params) -> float32 [B,H,S]; higher stays

    A row that is not finite in its key, value or score loses, whatever it scores. `Scores` is the fast form of the
    result: it says which of keys and values the score has not seen.

    The contract of a score function:

    - It is pure, of MLX operations only, and never waits for the device. Single tokens are scored inside a compiled
      step.
    - A row's score depends on that row alone. Its sums have an order that the number of tokens cannot change:
      `(a * b).sum(-1)`, and no matrix product.
    - It is a function of a module. Compiled steps are kept by the function, a limited number of them. What a method is
      told at construction comes as `params` and `numbers`. A closure made for each method is right too, but is traced
      by itself.

    Args:
        name: of the method.
        score: see above.
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay. None where the factory has no such argument: 0, and no setting.
        rollback: tokens that can be taken back after evictions. None likewise.
        use_metal_kernels: for eviction. True or False; None uses them where they run.
        params: arrays per KV head by name. `score` sees them in this order, [H,D,...] as [B,H,D,...] and [H] as
            [B,H,1].
        value_params: the names of those that are as wide as values.
        numbers: single numbers, which `score` sees after `params`, each as [B,1,1]: a float as float32, an array of no
            dimension in its own dtype.
        settings: the arguments of the method's factory beside the row counts, plain JSON.

    Raises:
        ValueError: a count cannot work.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import static_eviction
        >>> def long_values(keys, values, positions, params):
        ...     return mx.square(values.astype(mx.float32)).sum(-1)
        >>> static_eviction("long_values", long_values, budget=64, n_sink=4).static
        True
    """
    if recent is None:
        budget, n_sink, _ = checks.row_limits(budget, n_sink, recent_name=None)
    else:
        budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    params = params or {}
    limits = {"budget": budget, "n_sink": n_sink}
    if recent is not None:
        limits["recent"] = recent
    if rollback is not None:
        limits["rollback"] = checks.whole_number("rollback", rollback, 0)
    scalars = [mx.array(number) for number in numbers]

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> StaticState:
        counts = {"recent": 0, **limits}
        store = init_store(batch, n_kv_heads, head_dim, value_dim, dtype, **counts, use_metal_kernels=use_metal_kernels)
        for param, array in params.items():
            width = (value_dim or head_dim) if param in value_params else head_dim
            checks.fits_heads(param, array, n_kv_heads, width)
        per_head = [per_row(array, batch) for array in params.values()]
        alike = [mx.broadcast_to(number, (batch, 1, 1)) for number in scalars]
        return StaticState(store=store, params=(*per_head, *alike))

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

    def arrival(state: StaticState, keys: mx.array, values: mx.array, valid: mx.array | None) -> mx.array:
        return static_ranks(state.store, keys, values, score, state.params, valid)

    made = {**limits, **(settings or {})}
    return Eviction(
        init,
        update,
        name,
        made,
        params,
        scored=all_scored,
        arrival=arrival,
        appends=lambda state: room(state.store),
    )


def per_row(array: mx.array, batch: int) -> mx.array:
    """`array` [H,...] repeated along a new batch axis in front; [B,H,1] of an array [H]."""
    array = array[:, None] if array.ndim == 1 else array
    return mx.broadcast_to(array, (batch, *array.shape))

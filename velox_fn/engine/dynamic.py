"""The engine of the dynamic methods: every query of the model changes the scores of the rows it sees.

An update has two halves. `land` lets the block in; its view goes to attention. Then the block's queries are observed:
they change the scores, and what exceeds the budget leaves. A caller who has the queries at once, or lets the keys stand
in for them, gets both halves from `update`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks, landing, select
from velox_fn.engine.attention import Observed, Queries
from velox_fn.engine.eviction import Eviction, Init, Observation, Shown, StateT, Update
from velox_fn.engine.half import Half, depending, floats, one_array
from velox_fn.engine.records import arrays, record
from velox_fn.engine.rows import Rows, View, arriving_positions
from velox_fn.engine.store import Store, check_block, init_store, used_rows


@record
class DynamicState:
    """The state of a method that needs nothing but the scores in its rows."""

    store: Store


def dynamic_init(*, budget: int, n_sink: int, recent: int) -> Init[DynamicState]:
    """The `init` of a method whose state is a `DynamicState`.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
    """

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> DynamicState:
        store = init_store(batch, n_kv_heads, head_dim, value_dim, dtype, budget=budget, n_sink=n_sink, recent=recent)
        return DynamicState(store=store)

    return init


Land = Callable[[Any, Half, Half, mx.array | None], tuple[Any, View]]
Observe = Callable[[Any, Queries, float | None, mx.array | None, mx.array | None], Any]


def land(state: Any, keys: Half, values: Half, valid: mx.array | None = None) -> tuple[Any, View]:
    """Let a block in, its rows at score 0: nothing is evicted but the landing row whose place a single token takes."""
    store = state.store
    check_block(store, keys, values, valid)
    shape = one_array(keys).shape[:3]
    positions = arriving_positions(store.offset, shape[2], valid)
    none_yet = select.Scores(mx.zeros(shape, mx.float32), unseen=floats(keys, values))
    ranks = select.arrival_ranks(none_yet, positions, store.staying)
    landed, view = landing.land(store, Rows(keys=keys, values=values, ranks=ranks), valid)
    return dataclasses.replace(state, store=landed), view


def rescore(store: Store, observed: Observed, scores: mx.array) -> Store:
    """`store`, as observed, with new scores on its rows, cut down to its limit.

    Args:
        store: on which the block has landed.
        observed: of `observe_rows`.
        scores: float32 [B,H,n].
    """
    return with_scores(store, scores, observed.query_positions.shape[1])


def with_scores(store: Store, scores: mx.array, n_tokens: int) -> Store:
    """`store`, on which S tokens have landed, with these scores float32 [B,H,n] on its rows, cut down to its limit.

    Sinks keep +inf, rows with a non-finite key or value keep -inf, and a score that is not finite becomes -inf.
    """
    rows = used_rows(store)
    full = n_tokens == 1 and store.filled > store.limit  # the shape of every step from now on: worth compiling for
    ranks = (_compiled_reranked if full else select.reranked)(rows.ranks, scores)
    return landing.settle(dataclasses.replace(store, keys=rows.keys, values=rows.values, ranks=ranks), n_tokens)


_compiled_reranked = mx.compile(select.reranked)


def updated(
    state: Any,
    keys: Half,
    values: Half,
    queries: mx.array | None,
    valid: mx.array | None,
    *,
    land: Land,
    observe: Observe,
) -> tuple[Any, View]:
    """Both halves at once: the block's queries [B,H_q,S,D] at scale 1/sqrt(D), or its keys in their place.

    Raises ValueError when the block or its queries do not fit the state.
    """
    landed, view = land(state, keys, values, valid)
    if queries is not None:
        checks.block_queries(queries, keys)
    else:
        queries, _ = state.store.widths.read(keys, values)
    settled = observe(landed, queries, None, valid, None)
    return settled, depending(view, arrays(settled))


def dynamic_eviction(
    name: str,
    init: Init[StateT],
    observe: Observe,
    settings: Mapping[str, Any],
    params: Mapping[str, mx.array] | None = None,
    land: Land = land,
    shown: Shown | None = None,
) -> Eviction[StateT]:
    """A method of two halves: `land` lets a block in, `observe` scores the rows by its queries and evicts.

    Its `update` does both at once. Scores depend on every query so far, so nothing can be taken back: rollback is not
    offered.

    Args:
        name: of the method.
        init: makes an empty state, such as `dynamic_init(...)`.
        observe: (state, queries, scale, valid, sinks) -> state.
        settings: the arguments of the method's factory, plain JSON.
        land: (state, keys, values, valid) -> (state, view).
        shown: how attention sees the keys, where not as they are stored.

    Returns:
        An `Eviction` with `needs_queries`.
    """

    halves = Observation[StateT](land=land, observe=observe)
    return Eviction(
        init,
        both_halves(halves),
        name,
        settings,
        params or {},
        needs_queries=True,
        static=False,
        observation=halves,
        shown=shown,
    )


def both_halves(observation: Observation[StateT]) -> Update[StateT]:
    """The `update` that lets a block in and has its queries observed at once."""

    def update(
        state: StateT,
        keys: mx.array,
        values: mx.array,
        *,
        queries: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[StateT, View]:
        return updated(state, keys, values, queries, valid, land=observation.land, observe=observation.observe)

    return update

"""MorphKV: keep the rows that the last tokens look at, and those tokens themselves.

The last `obs_window` tokens stay. A row before them scores by the attention weights w that their queries gave it, each
at its own time, fused by sum or by maximum:

    s_i = sum over the window of w_t,i    or    s_i = max over the window of w_t,i

When a token leaves the window its weights no longer count.

Source: "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs" (arXiv:2503.00979), by its
definition in the section on the method, whose number could not be checked, and the authors' code.

Differs from the paper:

- `n_sink` leading tokens always stay.
- Weights are those of the query's own softmax, over all the rows that it saw. The authors' code takes the softmax anew
  over the rows before the window.
- The query heads of a group are fused as tokens are, by sum or by maximum. The authors' code takes their maximum.
- A block is scored by its last queries and evicted from once.
- Of queries that are taken back, the weights no longer count. Those that they had displaced do not come back.
"""

import dataclasses

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.attention import Queries, attention_weights, observe_rows
from velox_fn.engine.dynamic import dynamic_eviction, rescore
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.noted import noted_at, with_room
from velox_fn.engine.observation_window import last_queries
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.records import record
from velox_fn.engine.store import Store, init_store, used_rows

FUSIONS = ("sum", "max")


@record
class MorphKVState:
    """Rows, and the weights that they got from the queries of the window."""

    store: Store
    weights: mx.array  # float32 [B,H,budget+1,obs_window], of the query at position t in column t mod obs_window
    positions: mx.array  # int32 [B,H,budget+1], of the rows that have these weights; -1: of none


def morphkv(
    *,
    budget: int = 512,
    n_sink: int = 4,
    obs_window: int = 32,
    fuse: str = "sum",
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[MorphKVState]:
    """The MorphKV method: keep the rows that the last tokens look at.

    Source: arXiv:2503.00979. Scores come from queries [B,H_q,S,D]; without them the keys stand in.

    Args:
        budget: most rows kept for each KV head, sinks and the window included.
        n_sink: leading tokens that always stay.
        obs_window: trailing tokens whose queries count. Their rows always stay.
        fuse: "sum" or "max" of their weights.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that scores by queries.

    Raises:
        ValueError: a count cannot work, or the fusion is unknown.

    Example:
        >>> from velox_fn import morphkv
        >>> morphkv(budget=256, fuse="max").needs_queries
        True
    """
    obs_window = checks.whole_number("obs_window", obs_window, 1)
    budget, n_sink, obs_window = checks.row_limits(budget, n_sink, obs_window, recent_name="obs_window")
    checks.one_of("fuse", fuse, FUSIONS)
    fused = mx.sum if fuse == "sum" else mx.max

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> MorphKVState:
        rows = (batch, n_kv_heads, budget + 1)
        return MorphKVState(
            store=init_store(
                batch, n_kv_heads, head_dim, value_dim, dtype, budget=budget, n_sink=n_sink, recent=obs_window
            ),
            weights=mx.zeros((*rows, obs_window)),
            positions=mx.full(rows, -1, mx.int32),
        )

    def observe(
        state: MorphKVState,
        queries: Queries,
        scale: float | None = None,
        valid: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> MorphKVState:
        observed = observe_rows(state.store, queries, scale, valid, sinks)
        last = last_queries(observed, state.store.offset, obs_window, padded=valid is not None)
        of_heads = fused(attention_weights(last), axis=2)  # [B,H,S',n]
        columns = mx.arange(obs_window)
        column = last.query_positions[..., None] % obs_window == columns
        column = (column & (last.query_positions >= 0)[..., None])[:, None]  # [B,1,S',obs_window]
        new = of_heads.swapaxes(-1, -2) @ column.astype(mx.float32)
        # Of a query that has been taken back since, none counts. The newest row noted was its own.
        newest = state.positions.max(-1, keepdims=True)
        first = state.store.offset - (queries.shape[2] if valid is None else valid)
        taken_back = newest - (newest - columns) % obs_window >= first[:, None, None]  # [B,H,obs_window]
        old = noted_at(state.weights, state.positions, observed.positions)
        old = mx.where(taken_back[:, :, None], 0.0, old)
        weights = mx.where(column.any(2)[:, :, None], new, old)
        store = rescore(state.store, observed, fused(weights, axis=-1))
        kept = select.rank_positions(used_rows(store).ranks)
        if store.filled < state.store.filled:  # some have left
            weights = noted_at(weights, observed.positions, kept)
        noted = {"weights": with_room(weights, budget + 1), "positions": with_room(kept, budget + 1, -1)}
        return dataclasses.replace(state, store=store, **noted)

    settings = {"budget": budget, "n_sink": n_sink, "obs_window": obs_window, "fuse": fuse}
    return at_intervals(pinning(dynamic_eviction("morphkv", init, observe, settings), pinned), interval)

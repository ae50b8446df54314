"""CurDKV: keep the rows that carry most of attention's output, by keys and values together.

For each query, attention sums up A = diag(a) V, where a holds its weights over the rows. A row's score is its
energy-weighted leverage in A (`directions/leverage.py`), summed over the steps so far. A row that attention looks at,
but whose value adds nothing, scores nothing.

A block of S tokens stacks its S weighted blocks. They have one Gram V^T diag(sum_t a_t^2) V, so one evaluation scores
the block, and the block is evicted from once. For S = 1 that is `curdkv_step`. `granularity="token"` folds the step
over the tokens. The query heads that share a KV head are stacked in the same way.

Source: inspired by "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition" (arXiv:2509.15038). What
its authors released is `cur`.

Differs from the paper:

- Leverage scores replace its sampling of rows and columns.
- `n_sink` leading tokens always stay.
- Scores add up over steps.
- The incoming keys stand in where no queries are given.
- A new row starts with its own leverage among the rows that it joins. With 0 it would tie with rows that are worth
  nothing, and its place would decide.
"""

import dataclasses
import functools
from typing import Any

import mlx.core as mx

from velox_fn.directions.leverage import (
    gram,
    leading_directions,
    leverage_along,
    leverage_scores,
    tracked_directions,
    weighted_rows,
)
from velox_fn.engine import checks, landing
from velox_fn.engine.attention import Queries, Reading, attention_mass, observe_rows
from velox_fn.engine.dynamic import dynamic_eviction, land, updated, with_scores
from velox_fn.engine.eviction import Eviction, Init
from velox_fn.engine.half import cut
from velox_fn.engine.interval import at_intervals, begun_at_intervals, interval_update
from velox_fn.engine.observation_window import last_queries
from velox_fn.engine.pinned import Pinned, pinned_state, pinning
from velox_fn.engine.records import record
from velox_fn.engine.rows import Rows, View
from velox_fn.engine.store import Store, init_store, used_rows


@record
class CurDKVState:
    """Rows and how they are scored."""

    store: Store
    rank_cap: int  # leading directions that count
    granularity: str  # "block": a block is scored and evicted once; "token": its tokens one after the other
    window: int | None  # a block's last queries that count; None: all
    mean: bool  # scores are means over the tokens that a row has been there for; otherwise sums
    basis: tuple[mx.array, ...] = ()  # float32 [B,H,D_v,2 rank_cap], leading directions of the last step, if tracked


def curdkv_init(
    batch: int,
    n_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: mx.Dtype = mx.float32,
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    rank_cap: int = 16,
    granularity: str = "block",
    window: int | None = None,
    mean: bool = False,
    solver: str = "subspace",
    interval: int = 1,
    pinned: Pinned = (),
) -> CurDKVState:
    """An empty state.

    Args:
        batch: sequences in lockstep.
        n_kv_heads: KV heads of the layer.
        head_dim: D, the width of keys.
        value_dim: D_v, the width of values. None is D.
        dtype: of the rows: float32, float16 or bfloat16.
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        rank_cap: leading singular directions that count.
        granularity: "block" scores a block of tokens together. "token" scores one after the other, in a Python loop.
        window: only the last so many queries of a block count. None counts all.
        mean: a row's score is the mean over the tokens since it came, so that old rows do not lead by their age.
        solver: "eigh" finds each step's directions exactly. "subspace" tracks them from one single-token step to the
            next where that is faster (granularity "block", D_v > 4 rank_cap). Blocks are exact with both.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Raises:
        ValueError: a count cannot work, or granularity or solver is unknown.
    """
    rank_cap = checks.whole_number("rank_cap", rank_cap, 1)
    checks.one_of("granularity", granularity, ("block", "token"))
    checks.one_of("solver", solver, ("subspace", "eigh"))
    checks.one_of("mean", mean, (False, True))
    if window is not None:
        window = checks.whole_number("window", window, 1)
    store = init_store(batch, n_kv_heads, head_dim, value_dim, dtype, budget=budget, n_sink=n_sink, recent=recent)
    tracks = solver == "subspace" and granularity == "block" and store.value_dim > 4 * rank_cap
    basis = (mx.zeros((batch, n_kv_heads, store.value_dim, 2 * rank_cap)),) if tracks else ()
    state = CurDKVState(store=store, rank_cap=rank_cap, granularity=granularity, window=window, mean=mean, basis=basis)
    begun: CurDKVState = begun_at_intervals(pinned_state(state, pinned), interval)
    return begun


def curdkv_step(
    state: CurDKVState,
    keys: mx.array,
    values: mx.array,
    *,
    queries: mx.array | None = None,
    valid: mx.array | None = None,
) -> tuple[CurDKVState, View]:
    """Take one token in: `curdkv_update` for S = 1.

    Args:
        state: of `curdkv_init` or an earlier step.
        keys: [B,H,1,D].
        values: [B,H,1,D_v].
        queries: [B,H_q,1,D]. None lets the keys stand in.
        valid: int32 [B], 1 where the token is real and 0 where it is padding. None: all are real.

    Returns:
        The next state, and the view: the keys and values that the token may attend to.

    Raises:
        ValueError: there is more than one token, or the token does not fit the state.
    """
    if keys.ndim == 4 and keys.shape[2] != 1:
        raise ValueError(f"curdkv_step takes one token, got {keys.shape[2]}; use curdkv_update for a block")
    return curdkv_update(state, keys, values, queries=queries, valid=valid)


def curdkv_update(
    state: CurDKVState,
    keys: mx.array,
    values: mx.array,
    *,
    queries: mx.array | None = None,
    valid: mx.array | None = None,
) -> tuple[CurDKVState, View]:
    """Take a block of S tokens in, score all rows by its queries, and evict once. See `eviction.Update`.

    Args:
        state: of `curdkv_init` or an earlier update.
        keys: [B,H,S,D].
        values: [B,H,S,D_v].
        queries: [B,H_q,S,D], the groups of query heads consecutive. None lets the keys stand in.
        valid: int32 [B], the real tokens of each sequence. None: all are real.

    Returns:
        The next state, and the view: the rows kept before the call, followed by the block.

    Raises:
        ValueError: the block or its queries do not fit the state.
    """
    if state.store.span is not None:
        return interval_update(_AT_ONCE, state, keys, values, queries=queries, valid=valid)
    settled: tuple[CurDKVState, View] = updated(state, keys, values, queries, valid, land=land, observe=curdkv_observe)
    return settled


def curdkv_observe(
    state: CurDKVState,
    queries: Queries,
    scale: float | None = None,
    valid: mx.array | None = None,
    sinks: mx.array | None = None,
) -> CurDKVState:
    """Score the rows by the queries [B,H_q,S,D] of the block that has landed, then evict.

    Args:
        state: as `land` left it.
        queries: of the block that has landed.
        scale: of the logits. None is 1/sqrt(D).
        valid: int32 [B], the real tokens of each sequence.
        sinks: [H_q], learned attention sinks, where the model has them.

    Raises:
        ValueError: queries came with arrays that the whole block read, and it is to be scored token by token.
    """
    n_tokens = queries.shape[2]
    if state.granularity == "block" or n_tokens == 1:
        return _scored(state, queries, scale, valid, sinks)
    if isinstance(queries, Reading):
        raise ValueError(
            "this model's attention reads other arrays than the cached rows, made for the whole block, so that its "
            "tokens cannot be scored one after the other; use granularity='block' or queries='proxy'"
        )
    store, block = _taken_off(state.store, n_tokens, valid)
    for t in range(n_tokens):
        one = Rows(keys=cut(block.keys, t, t + 1), values=cut(block.values, t, t + 1), ranks=block.ranks[:, :, t, None])
        present = None if valid is None else (valid > t).astype(mx.int32)
        landed, _ = landing.land(store, one, present)
        state = _scored(dataclasses.replace(state, store=landed), queries[:, :, t, None], scale, present, sinks)
        store = state.store
    return state


def curdkv(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    rank_cap: int = 16,
    granularity: str = "block",
    window: int | None = None,
    mean: bool = False,
    solver: str = "subspace",
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[CurDKVState]:
    """The CurDKV method: keep the rows that carry most of what attention puts out.

    Arguments and errors are those of `curdkv_init`.

    Source: inspired by arXiv:2509.15038; what its authors released is `cur`.

    Returns:
        An `Eviction` that scores by queries.

    Example:
        >>> from velox_fn import curdkv
        >>> curdkv(budget=256, window=64).needs_queries
        True
    """
    settings: dict[str, Any] = {
        "budget": budget,
        "n_sink": n_sink,
        "recent": recent,
        "rank_cap": rank_cap,
        "granularity": granularity,
        "window": window,
        "mean": mean,
        "solver": solver,
    }

    init: Init = functools.partial(curdkv_init, **settings)
    init(1, 1, 1)  # refuses settings that cannot work
    method = dynamic_eviction("curdkv", init, curdkv_observe, settings)
    return at_intervals(pinning(method, pinned), interval)


def _scored(
    state: CurDKVState,
    queries: Queries,
    scale: float | None,
    valid: mx.array | None,
    sinks: mx.array | None,
) -> CurDKVState:
    """Add the leverage of the stacked weighted blocks of these queries to the scores, then evict once."""
    store, n_tokens = state.store, queries.shape[2]
    observed = observe_rows(store, queries, scale, valid, sinks)
    counted = observed
    if state.window is not None and state.window < n_tokens:
        counted = last_queries(observed, store.offset, state.window, padded=valid is not None)
    mass = attention_mass(counted, power=2)
    leverage, basis = _leverage(state, mx.sqrt(mass), observed.rows.values, n_tokens, valid)
    scores = observed.scores + leverage
    if state.mean:
        age = store.offset[:, None, None] - observed.positions
        age_before = mx.maximum(age - (n_tokens if valid is None else valid[:, None, None]), 0)
        scores = (observed.scores * age_before + leverage) / age
    return dataclasses.replace(state, store=with_scores(store, scores, n_tokens), basis=basis)


def _leverage(
    state: CurDKVState, weights: mx.array, values: mx.array, n_tokens: int, valid: mx.array | None
) -> tuple[mx.array, tuple[mx.array, ...]]:
    """Leverage float32 [B,H,n], and the directions to start from next time."""
    if not state.basis:
        return leverage_scores(weights, values, state.rank_cap), ()
    weighted = weighted_rows(weights, values)
    matrix, (before,) = gram(weighted), state.basis
    basis = tracked_directions(matrix, before) if n_tokens == 1 else leading_directions(matrix, before.shape[-1])
    if valid is not None:  # where a sequence has padding alone, its directions stay
        basis = mx.where((valid > 0)[:, None, None, None], basis, before)
    return leverage_along(weighted, basis[..., -state.rank_cap :]), (basis,)


def _taken_off(store: Store, n_tokens: int, valid: mx.array | None) -> tuple[Store, Rows]:
    """`store` as it was before the S > 1 tokens that landed last, and these."""
    n = store.filled - n_tokens
    rows = used_rows(store)
    before = dataclasses.replace(
        store,
        keys=cut(rows.keys, 0, n),
        values=cut(rows.values, 0, n),
        ranks=rows.ranks[:, :, :n],
        offset=store.offset - (n_tokens if valid is None else valid),
        filled=n,
        seen_by_all=store.seen_by_all - (n_tokens if valid is None else 0),
    )
    return before, Rows(keys=cut(rows.keys, n, None), values=cut(rows.values, n, None), ranks=rows.ranks[:, :, n:])


_AT_ONCE = dynamic_eviction("curdkv", curdkv_init, curdkv_observe, {})
"""The method without an interval, which is given each whole interval as one block."""

"""TOVA: keep the rows that the last query looks at most.

A row's score is the attention weight that the newest query gives it, averaged over the heads of the layer. All heads
keep the same tokens.

Source: "Transformers are Multi-State RNNs" (arXiv:2401.06104), section 3.2.

Differs from the paper:

- A block is scored by its last query and evicted from once. The paper goes token by token.
- `n_sink` leading tokens always stay. As in the paper, a token is not protected for being new.
- A row that is not finite in one head leaves all of them.
"""

import dataclasses

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.attention import Queries, attention_mass, observe_rows
from velox_fn.engine.dynamic import DynamicState, dynamic_eviction, dynamic_init, rescore
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.observation_window import last_queries
from velox_fn.engine.pinned import Pinned, pinning


def tova(*, budget: int = 512, n_sink: int = 4, interval: int = 1, pinned: Pinned = ()) -> Eviction[DynamicState]:
    """The TOVA method: keep the rows that the last query looks at most, the same in all heads.

    Source: arXiv:2401.06104, section 3.2.

    Args:
        budget: most rows kept, the same ones for all heads, sinks included.
        n_sink: leading tokens that always stay.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that scores by queries.

    Raises:
        ValueError: a count cannot work.

    Example:
        >>> from velox_fn import tova
        >>> tova(budget=256).needs_queries
        True
    """
    budget, n_sink, _ = checks.row_limits(budget, n_sink, recent_name=None)

    init = dynamic_init(budget=budget, n_sink=n_sink, recent=0)
    method = dynamic_eviction("tova", init, tova_observe, {"budget": budget, "n_sink": n_sink})
    return at_intervals(pinning(method, pinned), interval)


def tova_observe(
    state: DynamicState,
    queries: Queries,
    scale: float | None = None,
    valid: mx.array | None = None,
    sinks: mx.array | None = None,
) -> DynamicState:
    """Score the rows by the attention of the block's last query, of [B,H_q,S,D], then evict."""
    observed = observe_rows(state.store, queries, scale, valid, sinks)
    last = last_queries(observed, state.store.offset, 1, padded=valid is not None)
    weights = attention_mass(last).sum(axis=1, keepdims=True) / queries.shape[1]
    unsound = (observed.scores == -mx.inf).any(axis=1, keepdims=True)
    scores = mx.broadcast_to(mx.where(unsound, -mx.inf, weights), observed.scores.shape)
    return dataclasses.replace(state, store=rescore(state.store, observed, scores))

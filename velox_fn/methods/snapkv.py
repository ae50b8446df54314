"""SnapKV: keep the rows that the last queries look at, and their neighbours.

The last `obs_window` queries vote. A row's score is the attention weight that it gets from them, summed, then averaged
over a neighbourhood of `kernel` rows. The window's own rows stay.

Source: "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469), section 4.

Differs from the paper:

- `n_sink` leading tokens always stay.
- The query heads of a group vote together, for the one KV head that they share.
- Eviction goes on after the prompt, where the paper stops. There the window slides: S new queries take S / obs_window
  off the old sum of votes and add their own. So a block of at least `obs_window` queries starts the vote anew, as in
  the paper, and single tokens make a moving average. Rows that leave the window keep the votes that they got in it.
"""

import dataclasses
import functools
from collections.abc import Callable

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.attention import Queries, attention_mass, observe_rows
from velox_fn.engine.dynamic import DynamicState, dynamic_eviction, dynamic_init, rescore
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.landing import STEPS_KEPT
from velox_fn.engine.observation_window import last_queries
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.rows import temporal_order


def snapkv(
    *, budget: int = 512, n_sink: int = 4, obs_window: int = 32, kernel: int = 5, interval: int = 1, pinned: Pinned = ()
) -> Eviction[DynamicState]:
    """The SnapKV method: keep the rows that the last queries look at, and their neighbours.

    Source: arXiv:2404.14469, section 4. Scores come from queries [B,H_q,S,D]; without them the keys
    stand in.

    Args:
        budget: most rows kept for each KV head, sinks and the window included.
        n_sink: leading tokens that always stay.
        obs_window: trailing queries that vote. Their rows always stay.
        kernel: rows that votes are averaged over, an odd number.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that scores by queries.

    Raises:
        ValueError: a count cannot work, or `kernel` is even.

    Example:
        >>> from velox_fn import snapkv
        >>> snapkv(budget=256, obs_window=16).needs_queries
        True
    """
    obs_window = checks.whole_number("obs_window", obs_window, 1)
    kernel = checks.whole_number("kernel", kernel, 1)
    budget, n_sink, obs_window = checks.row_limits(budget, n_sink, obs_window, recent_name="obs_window")
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd, so that a row stands in the middle of its neighbours, got {kernel}")

    init = dynamic_init(budget=budget, n_sink=n_sink, recent=obs_window)

    def observe(
        state: DynamicState,
        queries: Queries,
        scale: float | None = None,
        valid: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> DynamicState:
        observed = observe_rows(state.store, queries, scale, valid, sinks)
        offset, n_queries = state.store.offset, queries.shape[2]
        votes = attention_mass(last_queries(observed, offset, obs_window, padded=valid is not None))
        unordered = [] if state.store.ordered else [observed.rows.ranks]
        in_window = observed.positions >= (offset - obs_window)[:, None, None]
        votes = _compiled_average(kernel)(votes, in_window, *unordered)
        new = mx.full(offset.shape, n_queries) if valid is None else valid
        left = mx.maximum(1 - new / obs_window, 0.0)[:, None, None]
        old = mx.where(mx.isfinite(observed.scores), observed.scores, 0.0)
        return dataclasses.replace(state, store=rescore(state.store, observed, left * old + votes))

    settings = {"budget": budget, "n_sink": n_sink, "obs_window": obs_window, "kernel": kernel}
    return at_intervals(pinning(dynamic_eviction("snapkv", init, observe, settings), pinned), interval)


@functools.lru_cache(STEPS_KEPT)
def _compiled_average(kernel: int) -> Callable[..., mx.array]:
    """`_averaged` as one compiled function of arrays: much of it is small."""
    return mx.compile(functools.partial(_averaged, kernel))


def _averaged(kernel: int, votes: mx.array, in_window: mx.array, ranks: mx.array | None = None) -> mx.array:
    """Votes float32 [B,H,n] averaged over `kernel` neighbours in time, with zeros past the ends.

    in_window bool [B,H,n]: rows of the window do not lend votes to those before it, since the paper averages over the
    prefix alone. ranks int64 [B,H,n]: of the rows; None when they stand in temporal order.
    """
    if ranks is not None:
        order = temporal_order(ranks)
        in_time = [mx.take_along_axis(array, order, axis=-1) for array in (votes, in_window)]
        return mx.put_along_axis(votes, order, _averaged(kernel, *in_time), axis=-1)
    n_rows, reach = votes.shape[-1], kernel // 2
    apart = mx.stack([mx.where(in_window, votes, 0.0), mx.where(in_window, 0.0, votes)])
    padded = mx.pad(apart, [(0, 0), (0, 0), (0, 0), (reach, reach)])
    sums = sum((padded[..., i : i + n_rows] for i in range(kernel)), mx.zeros_like(apart)) / kernel
    return mx.where(in_window, sums[0], sums[1])

"""SnapKV: keep the rows that the last queries look at, and their neighbours.

Source: "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469), section 4: the last
`obs_window` queries of the prompt vote. A row's score is the attention weight it gets from them, summed, then averaged
over a neighbourhood of `kernel` rows; the window itself stays.

Differs from the paper: `n_sink` leading tokens always stay; the query heads of a group vote together, for the one KV
head that they share; and eviction goes on after the prompt, where the paper stops. There the window slides: S new
queries take S / obs_window off the old sum of votes and add their own, so a prefill block of at least `obs_window`
queries starts the vote anew, as in the paper, and one token at a time is a moving average. Rows leaving the window keep
the votes that they got in it.
"""

import dataclasses

import mlx.core as mx

from velox_fn import checks
from velox_fn.attention import attention_mass, observe_rows
from velox_fn.dynamic import DynamicState, dynamic_eviction, dynamic_init, rescore
from velox_fn.eviction import Eviction
from velox_fn.observation_window import last_queries
from velox_fn.rows import temporal_order


def snapkv(*, budget: int = 512, n_sink: int = 4, obs_window: int = 32, kernel: int = 5) -> Eviction:
    """The SnapKV method.

    obs_window: trailing queries that vote, whose rows cannot be evicted. kernel: rows averaged over, an odd number.
    Raises ValueError on counts that cannot work.
    """
    checks.whole_number("obs_window", obs_window, 1)
    budget, n_sink, obs_window = checks.row_limits(budget, n_sink, obs_window, recent_name="obs_window")
    if checks.whole_number("kernel", kernel, 1) % 2 == 0:
        raise ValueError(f"kernel must be odd, so that a row stands in the middle of its neighbours, got {kernel}")

    init = dynamic_init(budget=budget, n_sink=n_sink, recent=obs_window)

    def observe(
        state: DynamicState, queries: mx.array, scale: float | None = None, valid: mx.array | None = None
    ) -> DynamicState:
        observed = observe_rows(state.store, queries, scale, valid)
        offset, n_queries = state.store.offset, queries.shape[2]
        votes = attention_mass(last_queries(observed, offset, obs_window, padded=valid is not None))
        order = None if state.store.ordered else temporal_order(observed.rows.ranks)
        # The window's rows do not lend votes to those before it: the paper averages over the prefix alone.
        in_window = observed.positions >= (offset - obs_window)[:, None, None]
        votes = mx.where(
            in_window,
            _averaged(mx.where(in_window, votes, 0.0), kernel, order),
            _averaged(mx.where(in_window, 0.0, votes), kernel, order),
        )
        new = mx.full(offset.shape, n_queries) if valid is None else valid
        left = mx.maximum(1 - new / obs_window, 0.0)[:, None, None]
        old = mx.where(mx.isfinite(observed.scores), observed.scores, 0.0)
        return dataclasses.replace(state, store=rescore(state.store, observed, left * old + votes))

    settings = {"budget": budget, "n_sink": n_sink, "obs_window": obs_window, "kernel": kernel}
    return dynamic_eviction("snapkv", init, observe, settings)


def _averaged(votes: mx.array, kernel: int, order: mx.array | None) -> mx.array:
    """Votes float32 [B,H,n] averaged over `kernel` neighbours in time, with zeros past the ends.

    order: indices [B,H,n] that put the rows in temporal order; None when they stand in it.
    """
    if order is not None:
        averaged = _averaged(mx.take_along_axis(votes, order, axis=-1), kernel, None)
        return mx.put_along_axis(votes, order, averaged, axis=-1)
    n_rows, reach = votes.shape[-1], kernel // 2
    padded = mx.pad(votes, [(0, 0), (0, 0), (reach, reach)])
    return sum((padded[..., i : i + n_rows] for i in range(kernel)), mx.zeros_like(votes)) / kernel

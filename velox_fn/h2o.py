"""H2O: keep the rows that attention has looked at most, and the most recent ones.

Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv:2306.14048),
section 4: a row's score is the attention weight it received, summed over all queries so far.

Differs from the paper: `grace` recent rows are protected where the paper splits the budget in half; `n_sink` leading
tokens always stay; a block is scored by all its queries and evicted once; a new row starts with the weight its own
block gives it; positions are not renumbered (RoPE keeps the true ones).
"""

import dataclasses

import mlx.core as mx

from velox_fn import checks, store
from velox_fn.attention import attention_mass, observe_rows
from velox_fn.dynamic import DynamicState, dynamic_eviction, rescore
from velox_fn.eviction import Eviction


def h2o(*, budget: int = 512, n_sink: int = 4, grace: int = 16) -> Eviction:
    """The H2O method. `grace`: trailing rows that cannot be evicted. ValueError on counts that cannot work."""
    budget, n_sink, grace = checks.row_limits(budget, n_sink, grace, recent_name="grace")

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> DynamicState:
        return DynamicState(
            store=store.init_store(
                batch, n_kv_heads, head_dim, value_dim, dtype, budget=budget, n_sink=n_sink, recent=grace
            )
        )

    return dynamic_eviction("h2o", init, h2o_observe, {"budget": budget, "n_sink": n_sink, "grace": grace})


def h2o_observe(
    state: DynamicState, queries: mx.array, scale: float | None = None, valid: mx.array | None = None
) -> DynamicState:
    """Add the attention mass of the block's queries [B,H_q,S,D] to the rows' scores, then evict."""
    observed = observe_rows(state.store, queries, scale, valid)
    scores = observed.scores + attention_mass(observed)
    return dataclasses.replace(state, store=rescore(state.store, observed, scores))

"""H2O: keep the rows that attention has looked at most, and the most recent ones.

A row's score is the attention weight that it received, summed over all queries so far.

Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv:2306.14048),
section 4.

Differs from the paper:

- `grace` recent rows are protected. The paper gives them half of the budget.
- `n_sink` leading tokens always stay.
- A block is scored by all its queries and evicted from once.
- A new row starts with the weight that its own block gives it.
- Positions stay true. With `renumber=True` attention sees the rows without gaps, as in the authors' code.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.attention import Queries, Reading, attention_mass, observe_rows
from velox_fn.engine.dynamic import DynamicState, dynamic_eviction, dynamic_init, land, rescore
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.renumber import gap_free, gap_free_view, renumbering
from velox_fn.engine.rope import RopeSpec
from velox_fn.engine.rows import View


def h2o(
    *,
    budget: int = 512,
    n_sink: int = 4,
    grace: int = 16,
    renumber: bool = False,
    rope: RopeSpec | Mapping[str, Any] | None = None,
    rope_base: float | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[DynamicState]:
    """The H2O method: keep the rows that attention has looked at most, and the most recent ones.

    Source: arXiv:2306.14048, section 4. Scores come from queries [B,H_q,S,D]; without them the keys
    stand in.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        grace: trailing tokens that always stay.
        renumber: show attention the n kept rows at positions offset - n ... offset - 1. Needs `rope`.
        rope: the model's rotary embedding. `install` reads it.
        rope_base: takes the place of the rotary embedding's base.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that scores by queries.

    Raises:
        ValueError: a count cannot work, `rope` is missing, or it has no base to replace.

    Example:
        >>> from velox_fn import h2o
        >>> h2o(budget=256, grace=32).needs_queries
        True
    """
    budget, n_sink, grace = checks.row_limits(budget, n_sink, grace, recent_name="grace")
    spec = renumbering(renumber, rope, rope_base)

    init = dynamic_init(budget=budget, n_sink=n_sink, recent=grace)
    settings = {
        "budget": budget,
        "n_sink": n_sink,
        "grace": grace,
        "renumber": renumber,
        "rope": None if spec is None else spec.plain(),
    }
    method = dynamic_eviction(
        "h2o",
        init,
        functools.partial(h2o_observe, rope=spec),
        settings,
        land=land if spec is None else functools.partial(_land_gap_free, spec),
        shown=None if spec is None else functools.partial(gap_free, rope=spec),
    )
    return at_intervals(pinning(method, pinned), interval)


def h2o_observe(
    state: DynamicState,
    queries: Queries,
    scale: float | None = None,
    valid: mx.array | None = None,
    sinks: mx.array | None = None,
    rope: RopeSpec | None = None,
) -> DynamicState:
    """Add the attention mass of the block's queries [B,H_q,S,D] to the rows' scores, then evict.

    With `rope` the mass is that on rows without gaps, as the view showed them.
    """
    observed = attended = observe_rows(state.store, queries, scale, valid, sinks)
    if rope is not None and not isinstance(queries, Reading):  # what was read is without gaps already
        keys = gap_free(observed.keys, observed.positions, state.store.offset, rope)
        attended = dataclasses.replace(observed, keys=keys)
    scores = observed.scores + attention_mass(attended)
    return dataclasses.replace(state, store=rescore(state.store, observed, scores))


def _land_gap_free(
    rope: RopeSpec, state: DynamicState, keys: mx.array, values: mx.array, valid: mx.array | None = None
) -> tuple[DynamicState, View]:
    landed, view = land(state, keys, values, valid)
    return landed, gap_free_view(state.store, landed.store, view, keys.shape[2], valid, rope)

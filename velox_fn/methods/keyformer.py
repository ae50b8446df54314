"""Keyformer: keep the rows that perturbed attention has looked at most, and the most recent ones.

A row's score is the weight that it received, summed over all queries so far, of a softmax over logits x that Gumbel
noise g perturbs and a temperature tau flattens:

    s_i = sum over queries of exp((x_i + g_i) / tau) / sum_j exp((x_j + g_j) / tau)

The temperature goes from `tau_init` to `tau_end` in `rise` equal steps, one for each row that has left.

Source: "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference"
(arXiv:2403.09054), by its definition in the section on the method, whose number could not be checked.

Differs from the paper:

- The temperature counts the rows that have left a sequence, where the paper counts generated tokens from the end of
  the prompt: a cache does not know where a prompt ends. The paper's range is the length of the generated text.
- `n_sink` leading tokens always stay. `recent` trailing ones may; the paper gives them 20 to 30 % of the budget.
- The query heads of a group share their noise and their rows.
- The noise is a hash of seed, layer, head and position, one draw for a row, as the text has it: g_i. With `redraw=True`
  every query draws anew, as in the authors' code.
- A block is scored by all its queries and evicted from once.
"""

import dataclasses

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.attention import Queries, attention_mass, observe_rows
from velox_fn.engine.draws import checked_draws, drawn_bits, gumbel, layer_key, mixed
from velox_fn.engine.dynamic import DynamicState, dynamic_eviction, dynamic_init, rescore
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning


def keyformer(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    tau_init: float = 1.0,
    tau_end: float = 2.0,
    rise: int = 512,
    redraw: bool = False,
    seed: int = 0,
    layer: int = 0,
    first_head: int = 0,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[DynamicState]:
    """The Keyformer method: keep the rows that perturbed attention has looked at most.

    Source: arXiv:2403.09054. Scores come from queries [B,H_q,S,D]; without them the keys stand in.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        tau_init: temperature of the softmax while no row has left.
        tau_end: temperature once `rise` rows have left.
        rise: rows from the first temperature to the last.
        redraw: draw noise for each query and row, and not once for a row.
        seed: of the noise; a whole number below 2^32, like the next two.
        layer: the layer's index, so that layers draw apart.
        first_head: the index, among the layer's KV heads, of the first one that this cache holds.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that scores by queries.

    Raises:
        ValueError: a count cannot work, or a temperature is not above 0.

    Example:
        >>> from velox_fn import keyformer
        >>> keyformer(budget=256, recent=64).needs_queries
        True
    """
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    tau_init, tau_end = (checks.above_zero(name, t) for name, t in (("tau_init", tau_init), ("tau_end", tau_end)))
    rise = checks.whole_number("rise", rise, 1)
    checks.one_of("redraw", redraw, (False, True))
    draws = checked_draws(seed, layer, first_head)
    of_layer = mx.array(layer_key(draws["seed"], draws["layer"]), mx.uint32)

    def noise(at_query: mx.array, at_row: mx.array) -> mx.array:
        bits = drawn_bits(of_layer, draws["first_head"], at_row, at_row.shape[1])[:, :, None, None]
        return gumbel(mixed(bits ^ at_query[:, None, None, :, None].astype(mx.uint32)) if redraw else bits)

    def observe(
        state: DynamicState,
        queries: Queries,
        scale: float | None = None,
        valid: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> DynamicState:
        observed = observe_rows(state.store, queries, scale, valid, sinks)
        left = state.store.offset - (queries.shape[2] if valid is None else valid) - budget
        tau = tau_init + (tau_end - tau_init) / rise * mx.clip(left, 0, rise)
        wide = tau[:, None, None, None, None]
        cooler = dataclasses.replace(
            observed,
            queries=observed.queries / wide,
            sinks=None if observed.sinks is None else observed.sinks / tau[:, None, None],
            added=None if observed.added is None else observed.added / wide,
        )
        mass = attention_mass(cooler, noise=lambda at_query, at_row: noise(at_query, at_row) / wide)
        return dataclasses.replace(state, store=rescore(state.store, observed, observed.scores + mass))

    settings = {"budget": budget, "n_sink": n_sink, "recent": recent, "tau_init": tau_init, "tau_end": tau_end}
    settings |= {"rise": rise, "redraw": redraw, **draws}
    init = dynamic_init(budget=budget, n_sink=n_sink, recent=recent)
    return at_intervals(pinning(dynamic_eviction("keyformer", init, observe, settings), pinned), interval)

"""Cache merging: the value of a row that leaves is added to those that follow it, by attention and chance.

A row i that leaves, whichever method chose it, is merged with probability clamp(A_i / mean of A_k, 0, 1). A is the
attention that a row has received from all queries, and k are the m kept rows that follow row i. A merge adds V_i / m to
the value of each of them. Keys stay as they came.

Source: "CaM: Cache Merging for Memory-efficient LLMs Inference" (Zhang et al., ICML 2024, PMLR 235:58840-58850),
equation 14 and algorithm 1.

Differs from the paper:

- Several rows may leave with one call. What a kept row gains in one call is at most the mean of the values merged into
  it: of c > m values each counts 1/c, not 1/m. The authors' code merges none of the rows that leave after a prompt.
- The query heads of a group count together.
- The draw is a hash of seed and position, the same in all heads and layers, so that batches and shards draw alike.
- A row with a non-finite key or value is not merged.
- The authors' code takes the weights of the last query for A, and the rows of the recent window for k.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.attention import Observed, Queries, attention_mass, observe_rows
from velox_fn.engine.draws import mixed, uniform
from velox_fn.engine.dynamic import both_halves
from velox_fn.engine.eviction import Eviction, Observation
from velox_fn.engine.landing import without_landing_row
from velox_fn.engine.noted import noted_at, with_room
from velox_fn.engine.records import record, replaced
from velox_fn.engine.rows import View, rows_at
from velox_fn.engine.store import Store, used_rows

NO_MERGING: Mapping[str, int] = MappingProxyType({"merge": 0, "merge_seed": 0})
"""The settings of rows that leave without a trace."""


@record
class MergingState:
    """Rows, whose values hold others', and the attention that they have received."""

    store: Store
    chosen: Any  # the state of the method that chooses the rows, without them
    mass: mx.array  # float32 [B,H,budget], attention received
    positions: mx.array  # int32 [B,H,budget], of the rows that have received it; -1: of none


def merging(method: Eviction, *, merge: int = 32, merge_seed: int = 0) -> Eviction[Any]:
    """`method`, with the values of rows that leave merged into rows that stay; with merge=0, `method` as it is.

    Source: CaM, ICML 2024, algorithm 1. Stored values are then not the model's own. Which rows stay is up to `method`.
    A step costs the attention of one more query, and a copy of the rows.

    Args:
        method: what evicts. It must score by queries, and evict with every call: `at_intervals` comes after this.
        merge: m, the kept rows after a leaving one that take in its value. 0: none.
        merge_seed: of the chance; a whole number below 2^32.

    Raises:
        ValueError: a number cannot work, or the method does not score by queries or evicts at intervals.

    Example:
        >>> from velox_fn import h2o, merging
        >>> merging(h2o(budget=64), merge=16).settings["merge"]
        16
    """
    merge = checks.whole_number("merge", merge, 0)
    merge_seed = checks.whole_number("merge_seed", merge_seed, 0, 2**32 - 1)
    if merge == 0:
        return method
    chooses = method.observation
    if chooses is None:
        raise ValueError(
            f"merge={merge} weighs rows by attention, and {method.name} reads no queries; use a method that does, such "
            "as h2o or snapkv, or leave merge out"
        )
    if method.settings["interval"] > 1:
        raise ValueError(
            f"{method.name} evicts at intervals already, which leaves no call to merge in; write at_intervals(merging("
            f"method), {method.settings['interval']}), or give merge= to the method's registered form"
        )
    seed = mx.array(mixed(merge_seed), mx.uint32)

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> MergingState:
        state: Any = method.init(batch, n_kv_heads, head_dim, value_dim, dtype)
        rows = (batch, n_kv_heads, state.store.limit)
        none = mx.full(rows, -1, mx.int32)
        return _with(state, MergingState(store=state.store, chosen=None, mass=mx.zeros(rows), positions=none))

    def land(state: MergingState, keys: Any, values: Any, valid: mx.array | None = None) -> tuple[MergingState, View]:
        landed, view = chooses.land(_own(state), keys, values, valid)
        return _with(landed, state), view

    def observe(
        state: MergingState,
        queries: Queries,
        scale: float | None = None,
        valid: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> MergingState:
        observed = observe_rows(state.store, queries, scale, valid, sinks)
        so_far = noted_at(state.mass[..., None], state.positions, observed.positions)[..., 0]
        first = state.store.offset - (queries.shape[2] if valid is None else valid)
        was_there = observed.positions < first[:, None, None]  # not one that was taken back, at a new row's position
        mass = so_far * was_there + attention_mass(observed)
        after = chooses.observe(_own(state), queries, scale, valid, sinks)
        # The landing row has left: no view shows it, and its value is merged now.
        store = without_landing_row(after.store) if after.store.filled > after.store.limit else after.store
        kept = select.rank_positions(used_rows(store).ranks)
        of_kept = noted_at(mass[..., None], observed.positions, kept)[..., 0]
        if state.store.filled > store.limit:
            store = _merged(store, observed, mass, of_kept, merge, seed)
        noted = {"mass": with_room(of_kept, store.limit), "positions": with_room(kept, store.limit, -1)}
        return _with(replaced(after, store=store), replaced(state, **noted))

    halves = Observation[Any](land=land, observe=observe)
    return dataclasses.replace(
        method,
        init=init,
        update=both_halves(halves),
        settings={**method.settings, "merge": merge, "merge_seed": merge_seed},
        observation=halves,
    )


def _merged(store: Store, observed: Observed, mass: mx.array, of_kept: mx.array, merge: int, seed: mx.array) -> Store:
    """`store`, whose rows take in those observed that are not among them; mass, of_kept: attention of both."""
    rows = used_rows(store)
    kept, n_left = select.rank_positions(rows.ranks), mass.shape[2] - rows.ranks.shape[2]
    stays = noted_at(mx.ones((*kept.shape, 1)), kept, observed.positions)[..., 0]
    # Where these are fewer than have left, so many are padding: a sequence with padding left has lost no row.
    left = mx.argpartition(stays, n_left - 1, axis=-1)[..., :n_left]
    at, mass, scores = (mx.take_along_axis(each, left, axis=-1) for each in (observed.positions, mass, observed.scores))
    follows = kept[:, :, None] > at[..., None]  # [B,H,n_left,n]
    before = (~follows).sum(-1, keepdims=True)  # kept rows up to each, and padding, as in:
    place = mx.argsort(mx.argsort(kept, axis=-1), axis=-1)[:, :, None].astype(mx.int32)
    near = (follows & (place - before < merge)).astype(mx.float32)
    mean = (near @ of_kept[..., None])[..., 0] / mx.maximum(near.sum(-1), 1)
    merges = (at >= 0) & (scores > -mx.inf) & (uniform(mixed(seed ^ at.astype(mx.uint32))) * mean < mass)
    into = near * merges[..., None]
    values = mx.where(merges[..., None], rows_at(observed.rows.values, left).astype(mx.float32), 0.0)
    gains = into.swapaxes(-1, -2) @ values / mx.maximum(into.sum(2), merge)[..., None]
    values = (rows.values.astype(mx.float32) + gains).astype(rows.values.dtype)
    return replaced(store, keys=rows.keys, values=values, ranks=rows.ranks)


def _own(state: MergingState) -> Any:
    """The state of the method that chooses."""
    return replaced(state.chosen, store=state.store)


def _with(own: Any, state: MergingState) -> MergingState:
    """`state`, with what the method that chooses has made of its own."""
    return replaced(state, store=own.store, chosen=replaced(own, store=None))

"""Add to a calibration what budgets cost each head, measured by one process or by several together."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.layers_with_losses import why_no_losses
from velox_cache.calibration.loss_table import LossTable
from velox_cache.calibration.passages import LEAST_CONTEXT, N_LATER, context_length, passages, work_of_losses
from velox_cache.calibration.row_losses import METHODS, SHARES, LossSums, measured_losses, no_loss_sums
from velox_cache.distributed.collectives import Group, broadcast, failing_together, own_share, summed
from velox_cache.introspection.shard import ModelShard
from velox_cache.progress import told_progress


def with_losses(
    calibration: Calibration,
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    shard: ModelShard,
    group: Group | None,
    *,
    shown: bool = False,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> Calibration:
    """The calibration with losses, measured on passages of the sequences, one after the other.

    calibration: the whole model's, the same on every rank. group: ranks that hold the whole model each, or the ranks
    of `shard`. shown: whether progress is told, and a warning that there are none. advance: is called with the part of
    `work_of_losses` that is done. The calibration comes back as it was
    where the sequences are not long enough, and where losses of this model cannot be measured.
    """
    tokens = list(chain.from_iterable(sequences))
    parts, reason = passages(tokens), why_no_losses(model, group)
    if not parts:
        reason = reason or f"the texts hold {len(tokens)} tokens, and losses need {LEAST_CONTEXT + N_LATER}"
    if reason is not None:
        if shown:
            warnings.warn(f"the calibration holds no losses: {reason}", stacklevel=3)
        return calibration
    methods = tuple(name for name in METHODS if name != "learned" or calibration.scores is not None)
    apart = group if shard.group is None else None
    own = parts if apart is None else own_share(parts, apart)
    n_layers = sum(filters is not None for filters in calibration.filters)
    with told_progress(max(1, 2 * n_layers * len(own)), shown=shown) as told, failing_together(apart):
        step = work_of_losses(len(tokens)) // max(1, 2 * n_layers * len(parts))

        def layer_done(doing: str, n_layers: int) -> None:
            told(doing, n_layers)
            advance(step * n_layers)

        sums = measured_losses(model, own, calibration, methods, shard, layer_done)
    losses: list[mx.array | None] = []
    for layer, filters in enumerate(calibration.filters):
        if filters is None:
            losses.append(None)
            continue
        whole = _whole(sums.get(layer - shard.first_layer), filters.shape[0], len(methods), shard, group)
        found = whole.mean()
        if found is None:  # a long call is not made as the short one was
            return calibration
        losses.append(found if group is None else broadcast(found, group))
    statistics = [
        None if layer is None else replace(layer, row_losses=found)
        for layer, found in zip(calibration.statistics, losses, strict=True)
    ]
    return replace(calibration, statistics=statistics, losses=LossTable(methods, SHARES, context_length(tokens)))


def _whole(own: LossSums | None, n_kv_heads: int, n_methods: int, shard: ModelShard, group: Group | None) -> LossSums:
    """The sums of the whole layer, of which this rank has `own`; collective. Ranks with one KV head have other query
    heads of it, whose losses add up, as if their errors had nothing in common."""
    nothing = no_loss_sums(n_kv_heads, n_methods)
    losses, count = nothing.losses, nothing.count
    with mx.stream(mx.cpu):
        if own is not None:
            losses[shard.heads(n_kv_heads)] = own.losses
            if shard.head_part == 0:  # ranks with other heads saw the same blocks
                count = own.count
    return LossSums(losses, count) if group is None else LossSums(summed(losses, group), summed(count, group))

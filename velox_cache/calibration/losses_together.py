"""Add to a calibration what budgets cost each head, measured by one process or by several together."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.loss_table import LossTable
from velox_cache.calibration.row_losses import (
    LEAST_CONTEXT,
    METHODS,
    SHARES,
    LossSums,
    context_length,
    measured_losses,
    no_loss_sums,
)
from velox_cache.distributed.collectives import Group, broadcast, failing_together, own_share, summed
from velox_cache.introspection.shard import ModelShard


def with_losses(
    calibration: Calibration,
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    shard: ModelShard,
    group: Group | None,
) -> Calibration:
    """The calibration with losses, measured on the longest of the sequences.

    calibration: the whole model's, the same on every rank. group: ranks that hold the whole model each, or the ranks
    of `shard`. The calibration comes back as it was where no sequence is long enough, and where a layer's losses cannot
    be seen.
    """
    longest = max(sequences, key=len)
    if context_length(longest) < LEAST_CONTEXT:
        return calibration
    methods = tuple(name for name in METHODS if name != "learned" or calibration.scores is not None)
    apart = group if shard.group is None else None
    own = [0] if apart is None else own_share([0], apart, cost=lambda _: len(longest))
    with failing_together(apart):
        sums = measured_losses(model, longest, calibration, methods, shard) if own else {}
    losses: list[mx.array | None] = []
    for layer, filters in enumerate(calibration.filters):
        if filters is None:
            losses.append(None)
            continue
        whole = _whole(sums.get(layer - shard.first_layer), filters.shape[0], len(methods), shard, group)
        found = whole.losses()
        if found is None:
            return calibration
        losses.append(found if group is None else broadcast(found, group))
    statistics = [
        None if layer is None else replace(layer, row_losses=found)
        for layer, found in zip(calibration.statistics, losses, strict=True)
    ]
    return replace(calibration, statistics=statistics, losses=LossTable(methods, SHARES, context_length(longest)))


def _whole(own: LossSums | None, n_kv_heads: int, n_methods: int, shard: ModelShard, group: Group | None) -> LossSums:
    """The sums of the whole layer, of which this rank has `own`; collective. Ranks with one KV head have other query
    heads of it, so that theirs add up."""
    whole = no_loss_sums(n_kv_heads, n_methods)
    with mx.stream(mx.cpu):
        if own is not None:
            heads = shard.heads(n_kv_heads)
            whole.errors[heads], whole.outputs[heads] = own.errors, own.outputs
            if shard.head_part == 0:  # ranks with other heads saw the same
                whole.sizes[:] = own.sizes
    if group is None:
        return whole
    return LossSums(*(summed(array, group) for array in (whole.errors, whole.outputs, whole.sizes)))

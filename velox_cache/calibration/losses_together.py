"""Add to a calibration what budgets cost each head, measured by one process or by several together."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.loss_table import LossTable
from velox_cache.calibration.passages import context_length, passages
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
) -> Calibration:
    """The calibration with losses, measured on passages of the sequences, one after the other.

    calibration: the whole model's, the same on every rank. group: ranks that hold the whole model each, or the ranks
    of `shard`. shown: whether progress is told. The calibration comes back as it was where the sequences are not long
    enough, and where a layer's losses cannot be seen.
    """
    tokens = list(chain.from_iterable(sequences))
    parts = passages(tokens)
    if not parts:
        return calibration
    methods = tuple(name for name in METHODS if name != "learned" or calibration.scores is not None)
    apart = group if shard.group is None else None
    own = parts if apart is None else own_share(parts, apart)
    n_layers = sum(filters is not None for filters in calibration.filters)
    with told_progress(max(1, 2 * n_layers * len(own)), shown=shown) as told, failing_together(apart):
        sums = measured_losses(model, own, calibration, methods, shard, told)
    losses: list[mx.array | None] = []
    for layer, filters in enumerate(calibration.filters):
        if filters is None:
            losses.append(None)
            continue
        whole = _whole(sums.get(layer - shard.first_layer), filters.shape[0], len(methods), shard, group)
        found = whole.mean()
        if found is None:
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

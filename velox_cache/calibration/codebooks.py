"""Add to a calibration the codebooks by which rows can be stored, made by one process or by several together."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.statistics import LayerStatistics
from velox_cache.distributed.collectives import Group, failing_together, own_share, summed
from velox_cache.introspection.observed_prefill import LayerQueries, observed_prefill
from velox_cache.introspection.shard import ModelShard
from velox_cache.progress import told_progress
from velox_fn.directions.codebooks import made_codebooks
from velox_fn.engine.codebooks import N_ENTRIES

MOST_TOKENS = 2048
"""Whose rows the codebooks are made of: those of the longest sequence."""


def with_codebooks(
    calibration: Calibration,
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    bits: int,
    shard: ModelShard,
    group: Group | None,
    *,
    shown: bool = False,
) -> Calibration:
    """The calibration with codebooks of so many bits a number, of rows of the longest of the sequences.

    calibration: the whole model's, the same on every rank. group: ranks that hold the whole model each, one of which
    makes all, or the ranks of `shard`, each of which makes those of its heads. shown: tell how far it is.

    Raises ValueError where rows cannot be coded in these bits, or are too few.
    """
    longest = max(sequences, key=len)[:MOST_TOKENS]
    apart = group if shard.group is None else None
    own = [0] if apart is None else own_share([0], apart, cost=lambda _: len(longest))
    calls: dict[int, LayerQueries] = {}
    for block in observed_prefill(model, longest) if own else ():  # ranks of a model run in step
        calls = {call.layer: call for call in block}
    made: dict[int, dict[str, mx.array]] = {}
    with (
        failing_together(group),
        told_progress(sum(call.keys.shape[1] for call in calls.values()), shown=shown) as told,
    ):
        told("making codebooks", 0)
        for layer, call in calls.items():
            made[layer] = made_codebooks(
                call.keys[0], call.values[0], bits, advance=lambda n: told("making codebooks", n)
            )
    statistics = [
        layer and replace(layer, **_whole(made.get(i - shard.first_layer), layer, bits, shard, group))
        for i, layer in enumerate(calibration.statistics)
    ]
    return replace(calibration, statistics=statistics)


def _whole(
    own: dict[str, mx.array] | None, layer: LayerStatistics, bits: int, shard: ModelShard, group: Group | None
) -> dict[str, mx.array]:
    """The arrays of the whole layer, of which this rank has `own`; collective."""
    if group is None:
        return own or {}
    n_kv_heads = layer.mean_keys.shape[0]
    entries = (n_kv_heads, N_ENTRIES, 8 // bits)
    whole = {
        "key_smoothing": mx.zeros(layer.mean_keys.shape),
        "key_codebook": mx.zeros(entries),
        "value_codebook": mx.zeros(entries),
    }
    if own is not None and shard.head_part * n_kv_heads % shard.head_parts == 0:  # of ranks with one head, the first
        for name, array in own.items():
            whole[name][shard.heads(n_kv_heads)] = array
    return {name: summed(array, group) for name, array in whole.items()}

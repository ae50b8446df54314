"""What of a whole model's calibration and budgets belongs to the part of it that this process holds."""

from dataclasses import replace

import mlx.core as mx

from velox_cache.calibration.artifact import Calibration
from velox_cache.installation.layer_budgets import Budgets
from velox_cache.installation.tiers import LayerBudget, is_by_head, listed
from velox_cache.introspection.shard import ModelShard


def part_of_calibration(shard: ModelShard, whole: Calibration, n_layers: int) -> Calibration:
    """What of a whole model's calibration belongs to this rank's `n_layers` layers and their heads.

    Raises ValueError when the calibration has another number of layers than the model, or too few for this rank's.
    """
    covered, needed = len(whole.filters), shard.first_layer + n_layers
    if covered < needed or (covered > needed and not shard.pipelined):  # a rank cannot tell how many follow its own
        raise ValueError(
            f"the calibration covers {covered} layers, but the model has {needed}{' or more' * shard.pipelined}; it "
            "was made for another model: calibrate this one"
        )
    if shard.group is None:
        return whole

    def own(by_head: mx.array) -> mx.array:
        return by_head[shard.heads(by_head.shape[0])]

    layers = slice(shard.first_layer, shard.first_layer + n_layers)
    return replace(
        whole,
        filters=[None if layer is None else own(layer) for layer in whole.filters[layers]],
        layer_layout=whole.layer_layout[layers],
        statistics=[None if layer is None else layer.mapped(own) for layer in whole.statistics[layers]],
    )


def part_of_budgets(shard: ModelShard, whole: Budgets, n_layers: int) -> Budgets:
    """Budgets of this rank's `n_layers` layers and their heads, from those of the whole model."""

    def own(budget: LayerBudget) -> LayerBudget:
        budget = listed(budget)
        return budget[shard.heads(len(budget))] if is_by_head(budget) else budget

    if callable(whole):
        return lambda layer: own(whole(layer + shard.first_layer))
    return [own(budget) for budget in (whole[shard.first_layer :][:n_layers] if shard.pipelined else whole)]

"""Each bounded layer's method, from what `install` is given."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeGuard, cast

import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.default_recent import recent_share, with_default_recent
from velox_cache.calibration.values_read import check_values_read
from velox_cache.installation.layer_arguments import check_heads_together, layer_arguments
from velox_cache.installation.layer_budgets import Budgets, layer_budgets
from velox_cache.installation.own_part import part_of_budgets, part_of_calibration
from velox_cache.installation.tiers import LayerBudget, Tier, check_heads, heads_by_budget, of_heads
from velox_cache.introspection.key_layouts import KeyLayouts, check_filter_layout
from velox_cache.introspection.plan import LayerPlan
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.shard import ModelShard
from velox_fn.engine.eviction import Eviction
from velox_fn.method import Method
from velox_fn.registry import find_method


def by_layer(
    method: Method,
    settings: Mapping[str, Any],
    budget: int | Budgets | None,
    calibration: Calibration | None,
    model: nn.Module,
    plan: Sequence[LayerPlan],
    shard: ModelShard,
    *,
    average: int | None = None,
) -> dict[int, tuple[Tier, ...]]:
    """Each bounded layer's method, with its own budget and its own part of the calibration, once for each tier.

    average: of budgets by a rule. A `recent` among the settings is then that of a layer with so many rows, and others
    have theirs in proportion.
    """
    bounded = [entry.layer for entry in plan if entry.bounded]
    own_budgets: Mapping[int, LayerBudget | None]
    if has_own_budgets(budget):
        own_budgets = layer_budgets(plan, part_of_budgets(shard, budget, len(plan)))
    else:
        own_budgets = dict.fromkeys(bounded, cast("int | None", budget))
    calibration = None if calibration is None else part_of_calibration(shard, calibration, len(plan))
    share: float | Fraction = recent_share(method, settings, calibration)
    if average is not None and method.recent and "recent" in settings:
        share = Fraction(settings["recent"], average)
        settings = {name: value for name, value in settings.items() if name != "recent"}
    methods, ropes, layouts = {}, ModelRopes(model), KeyLayouts(model)
    for layer in bounded:
        arguments = dict(settings) | layer_arguments(method, settings, model, layer, calibration, shard, ropes, layouts)
        own = own_budgets[layer]
        check_heads(method, layer, own, layouts, shard)
        tiers: list[Tier] = []
        for rows, heads in heads_by_budget(own).items():
            n_before = sum(len(tier.heads or ()) for tier in tiers)
            asked = of_heads(method, arguments, heads, n_before)
            if rows is not None or has_own_budgets(budget):
                asked["budget"] = rows
            try:
                tiers.append(Tier(heads, method.make(**with_default_recent(method, asked, share))))
            except ValueError as error:
                if not has_own_budgets(budget):  # what is wrong is wrong in every layer
                    raise
                raise ValueError(f"layer {shard.first_layer + layer}: {error}") from error
            check_filter_layout(layouts, layer, tiers[-1].method, heads)
        methods[layer] = tuple(tiers)
    return methods


def of_every_layer(
    method: Eviction, model: nn.Module, plan: Sequence[LayerPlan], shard: ModelShard
) -> dict[int, tuple[Tier, ...]]:
    """The same method for each bounded layer. ValueError when it cannot work on the model's heads or keys."""
    known = find_method(method.name)
    if known is not None:
        check_heads_together(known, shard)
        check_values_read(known, method.settings, model)
    layouts = KeyLayouts(model)
    layers = [entry.layer for entry in plan if entry.bounded]
    for layer in layers:
        check_filter_layout(layouts, layer, method)
    return dict.fromkeys(layers, (Tier(None, method),))


def has_own_budgets(budget: int | Budgets | None) -> TypeGuard[Budgets]:
    """Whether each layer has a budget of its own."""
    return callable(budget) or (isinstance(budget, Sequence) and not isinstance(budget, str))

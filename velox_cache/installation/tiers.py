"""The tiers of a layer: its heads, grouped by their budgets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from velox_cache.introspection.key_layouts import KeyLayouts
from velox_cache.introspection.shard import ModelShard
from velox_fn.engine.codebooks import ARRAYS as CODEBOOKS
from velox_fn.engine.eviction import Eviction
from velox_fn.method import PLACES, Method

LayerBudget = int | Sequence[int]
"""That of all heads of a layer, or one number for each of its KV heads."""


@dataclass(frozen=True)
class Tier:
    """Heads of a layer with one method. heads: None, all of them, however many."""

    heads: tuple[int, ...] | None
    method: Eviction


def n_heads(tier: Tier, tiers: Sequence[Tier]) -> tuple[int, int]:
    """How many heads a tier holds, of how many in all its layer's `tiers`; (1, 1) where it holds them all."""
    counts = [len(one.heads or (0,)) for one in tiers]
    return len(tier.heads or (0,)), sum(counts)


def settings_of(layers: Iterable[Sequence[Tier]]) -> dict[str, Any]:
    """The settings of all methods: the value where all agree, else a list of the layers', in which a layer whose heads
    differ has a list of theirs. A layer's place is no setting."""
    found = [list(tiers) for tiers in layers]
    names = [name for name in found[0][0].method.settings if name not in PLACES]
    return {name: _one_or_list([_one_or_list(_by_head(tiers, name)) for tiers in found]) for name in names}


def _by_head(tiers: Sequence[Tier], name: str) -> list[Any]:
    values = {head: tier.method.settings[name] for tier in tiers for head in tier.heads or (0,)}
    return [values[head] for head in sorted(values)]


def _one_or_list(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def listed(budget: Any) -> Any:
    """A layer's budget without the array, of numpy or MLX, in which it may come."""
    return budget.tolist() if hasattr(budget, "tolist") else budget


def is_by_head(budget: LayerBudget | None) -> TypeGuard[Sequence[int]]:
    """Whether each KV head of a layer has a budget of its own."""
    return isinstance(budget, Sequence) and not isinstance(budget, str)


def heads_by_budget(budget: LayerBudget | None) -> dict[int | None, tuple[int, ...] | None]:
    """The heads of each budget; None for all heads where a layer has one budget."""
    if not is_by_head(budget):
        return {cast("int | None", budget): None}
    return {one: tuple(head for head, own in enumerate(budget) if own == one) for one in dict.fromkeys(budget)}


def check_heads(method: Method, layer: int, budget: LayerBudget | None, layouts: KeyLayouts, shard: ModelShard) -> None:
    """ValueError unless a layer's heads can have the budgets that each is given."""
    if not is_by_head(budget):
        return
    layout = layouts.of_layer(layer)
    if not budget or (layout is not None and layout.n_kv_heads != len(budget)):
        heads = "some" if layout is None else layout.n_kv_heads
        raise ValueError(
            f"layer {shard.first_layer + layer} has {heads} KV heads, and its budget {list(budget)} is for "
            f"{len(budget)}; give one number for each, or one for all"
        )
    if method.pools_heads and len(set(budget)) > 1:
        raise ValueError(
            f"{method.label} scores a row by all heads of a layer together, so they keep the same rows and cannot have "
            "budgets of their own; give each layer one budget, or take a method that scores each head by itself"
        )


def of_heads(
    method: Method, arguments: Mapping[str, Any], heads: Sequence[int] | None, n_before: int
) -> dict[str, Any]:
    """A layer's arguments of a method, for some of its heads. n_before: heads of the tiers before.

    Calibrated arrays are those of the heads. Draws go by a head's place among the tiers, so that no two are alike.
    """
    if heads is None:
        return dict(arguments)
    own = {
        name: value if value is None else value[list(heads)]
        for name, value in arguments.items()
        if name in (*method.calibrated, *CODEBOOKS)
    }
    if "first_head" in arguments:
        own["first_head"] = arguments["first_head"] + n_before
    return {**arguments, **own}

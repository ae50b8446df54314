"""Which layers of a model get an evicting cache, and why the others do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from velox_cache.introspection.cache_kinds import class_name, is_list, is_plain, parts, with_parts
from velox_cache.introspection.latents import caches_latents, latent_attentions
from velox_cache.introspection.masks_asked_for import masks_asked_for

_OTHERS = {
    "RotatingKVCache": "a sliding window bounds itself",
    "ChunkedKVCache": "chunked attention bounds itself",
    "ArraysCache": "a recurrent state has a fixed size and no rows",
}

FULL_ATTENTION = "full attention"
LATENT_ATTENTION = (
    "full attention over latents (MLA): a row is a token's latent with its rotary part, one for all heads; methods "
    "that weigh values are refused, and fusion leaves its term of values out"
)

_SEVERAL_OVER_LATENTS = (
    "full attention over latents (MLA), several times in a layer, with a cache each: methods that need a calibration, "
    "which knows one attention of a layer, and methods that weigh values are refused"
)


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one layer's cache."""

    layer: int  # index in the prompt cache
    cache: str  # class name of the model's own cache
    bounded: bool
    reason: str


def plain_caches(model: nn.Module) -> list[Any]:
    """The caches that the model makes by itself, also when evicting ones are installed on it."""
    make_cache = getattr(type(model), "make_cache", None)  # the class's: an instance's may be installed
    return [KVCache() for _ in model.layers] if make_cache is None else list(make_cache(model))


def plan_layers(model: nn.Module) -> tuple[LayerPlan, ...]:
    """What `install` would do, entry by entry of the model's prompt cache."""
    caches = plain_caches(model)
    refusal, full = _refusal(model, caches), LATENT_ATTENTION if caches_latents(model) else FULL_ATTENTION
    if _has_several_attentions(model, caches):
        full = _SEVERAL_OVER_LATENTS
    return tuple(_plan(layer, cache, refusal, full) for layer, cache in enumerate(caches))


def check_one_attention_a_layer(model: nn.Module) -> None:
    """ValueError where queries of two attentions would be taken for those of one: a layer has several."""
    if _has_several_attentions(model, plain_caches(model)):
        raise ValueError(
            "a layer of this model has several attentions with a cache each, and a calibration knows one of a layer: "
            "take a method that needs none, such as h2o, keydiff or streaming_llm"
        )


def make_caches(model: nn.Module, plan: Sequence[LayerPlan], make_cache: Callable[[int], Any]) -> list[Any]:
    """Fresh caches for one sequence: evicting ones where the plan says so, the model's own elsewhere."""
    own = plain_caches(model)

    def bounded(layer: int) -> Callable[[Any], Any]:
        return lambda cache: make_cache(layer) if is_plain(cache) else cache

    return [
        with_parts(cache, bounded(entry.layer)) if entry.bounded else cache
        for entry, cache in zip(plan, own, strict=True)
    ]


def asks_for_mask_arrays(model: nn.Module) -> bool:
    """Whether the model makes its mask for full attention as an array, which fits one number of rows only."""
    return masks_asked_for(model, plain_caches(model)).arrays


def _plan(layer: int, cache: Any, refusal: str | None, full: str) -> LayerPlan:
    name = type(cache).__name__
    if is_list(cache):
        name = f"{name}({', '.join(type(part).__name__ for part in parts(cache))})"
    if not any(map(is_plain, parts(cache))):
        return LayerPlan(layer, name, False, "; ".join(dict.fromkeys(map(_why_not, parts(cache)))))
    if refusal is not None:
        return LayerPlan(layer, name, False, refusal)
    return LayerPlan(layer, name, True, full)


def _why_not(cache: Any) -> str:
    known = _OTHERS.get(type(cache).__name__)
    if known is not None:
        return f"{known}: left as the model made it"
    return (
        f"{class_name(cache)} is not a plain full-attention cache, that is, mlx_lm's KVCache or a copy of it that "
        "holds keys, values and offset alone: left as the model made it; if the layer attends to every token, let the "
        "model's make_cache return mlx_lm.models.cache.KVCache for it"
    )


def _has_several_attentions(model: nn.Module, caches: Sequence[Any]) -> bool:
    """Whether entries have a plain cache for each of several attentions (longcat), which do not mirror each other."""
    n_plain = _plain_in_each(caches)
    return max(n_plain, default=0) > 1 and len(latent_attentions(model)) == sum(n_plain)


def _plain_in_each(caches: Sequence[Any]) -> list[int]:
    return [sum(map(is_plain, parts(cache))) for cache in caches]


def _refusal(model: nn.Module, caches: Sequence[Any]) -> str | None:
    """Why no full-attention layer of this model can be bounded rightly, if that is so.

    It is all of them or none: a model builds one mask for its full-attention layers from one of their caches.
    """
    modules = list(model.modules())
    if max(_plain_in_each(caches), default=0) > 1 and not _has_several_attentions(model, caches):
        return (
            "a layer has several caches whose rows mirror each other (an indexer that picks rows of the other by their "
            "place); evicting from each by itself would break the match"
        )
    if any(getattr(module, "block_sparse", False) for module in modules):
        return "attention picks blocks of rows by their place (block-sparse), which evictions shift"
    if any("kv_reuse_layers" in module for module in modules):
        return (
            "layers that read the last layer's rows take their number for the position of their queries, and evictions "
            "lower it"
        )
    if masks_asked_for(model, caches).windows:
        return (
            "some of its layers see a sliding window of a cache that keeps every row; a window over the rows that "
            "evictions leave is not defined, and which layers those are cannot be told"
        )
    return None

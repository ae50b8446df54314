"""Of which layers losses can be measured: those whose queries are seen, and what attention adds to the stream, too."""

from collections.abc import Mapping, Sequence

import mlx.nn as nn

from velox_cache.distributed.collectives import Group, all_gather_texts
from velox_cache.introspection.attention_outputs import AttentionOutput, attention_outputs
from velox_cache.introspection.latents import caches_latents
from velox_cache.introspection.observed_prefill import LayerQueries, observed_prefill, viewed_caches


def paired(
    block: Sequence[LayerQueries], outputs: Mapping[int, Sequence[AttentionOutput]]
) -> list[tuple[LayerQueries, AttentionOutput]]:
    """The calls whose softmax is known, each with what the layer made of it. Layers are left out where one is not."""
    pairs = []
    for layer in dict.fromkeys(call.layer for call in block):
        calls, made = [call for call in block if call.layer == layer], outputs.get(layer, ())
        if len(calls) == len(made) and not any(call.terms.keys() - {"sinks"} for call in calls):
            pairs += list(zip(calls, made, strict=True))
    return pairs


def why_no_losses(model: nn.Module, group: Group | None = None) -> str | None:
    """Why no losses can be measured on this model, in words; None where they can. The model reads two tokens.

    group: ranks that ask together and get one answer, as each may have other layers.
    """
    reason = _why_none_here(model)
    return reason if group is None else next(filter(None, all_gather_texts(reason or "", group)), None)


def _why_none_here(model: nn.Module) -> str | None:
    if caches_latents(model):
        return "its attention reads latents, which all heads share, and no head's rows can be told from another's"
    caches = viewed_caches(model)
    try:
        with attention_outputs(model, caches) as outputs:
            [block] = observed_prefill(model, [0, 1], 2, caches=caches)
    except ValueError as error:
        return str(error)
    if not block:
        return "its attention reads other rows than its caches return"
    unseen = sorted({call.layer for call in block} - {call.layer for call, _ in paired(block, outputs)})
    if not unseen:
        return None
    return (
        f"layers {unseen} are not seen to add what attention gives, out of a matrix, by itself or through a norm, to "
        "what they pass on"
    )

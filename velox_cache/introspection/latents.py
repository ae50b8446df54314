"""Latent attention (MLA): whether a model has it, and its queries in the space of what it caches.

Cached are a latent [B,1,n,R], in the place of the key, and a rotary part [B,1,n,P], in the place of the value: one row
per token, from which the model makes keys and values of all heads. One token's query meets the latents themselves,
through the projection that makes keys of them (`embed_q`); those of a block meet keys made of all latents. Both ways
the rotary part adds to the logits.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.query_tap import ObservedAttention
from velox_fn.engine.rows import View


def caches_latents(model: nn.Module) -> bool:
    """Whether the model's full attention is over latents."""
    return any(map(_is_latent, model.modules()))


def latent_attentions(model: nn.Module) -> list[nn.Module]:
    """The model's attentions over latents, in the order in which it calls them."""
    return [module for layer in model.layers for module in layer.modules() if _is_latent(module)]


def over_latents(attention: Any, call: ObservedAttention, view: View) -> tuple[mx.array, Mapping[str, Any]]:
    """The queries [B,H_q,S,R] of a call over the latents of `view`, and what else enters its softmax, by name.

    attention: the module that made the call. `mask` is the rotary part of the logits [B,H_q,S,n].
    """
    latents, rotary = view
    if call.keys is latents:
        return call.queries, call.terms
    n_dims = attention.qk_nope_head_dim
    absorbed, turned = attention.embed_q(call.queries[..., :n_dims]), call.queries[..., n_dims:]
    if turned.shape[-1] == 0:
        return absorbed, call.terms
    return absorbed, {**call.terms, "mask": call.scale * (turned @ rotary.swapaxes(-1, -2))}


def _is_latent(module: nn.Module) -> bool:
    return "embed_q" in module

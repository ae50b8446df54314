"""Attention over rows as they are stored, without a copy in full precision."""

import mlx.core as mx

from velox_fn.engine.eviction import State
from velox_fn.engine.half import Half, one_array
from velox_fn.engine.rows import View
from velox_fn.engine.storage import Storage


def attend(
    state: State,
    queries: mx.array,
    view: View,
    *,
    scale: float | None = None,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The attention output [B,H_q,S,D_v] of a block over its view, whether its rows are quantised or not.

    Args:
        state: as the update left it.
        queries: [B,H_q,S,D], of the tokens that the view belongs to.
        view: as the same update gave it.
        scale: of the logits. None is 1/sqrt(D).
        mask: None, "causal", bool or numbers to be added, broadcastable to [B,H_q,S,n].
        sinks: [H_q], learned logits that draw weight and have no row.
    """
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    keys, values = view
    if isinstance(keys, tuple) or isinstance(values, tuple):
        return quantised_attention(state.store.widths, queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def quantised_attention(
    widths: Storage,
    queries: mx.array,
    keys: Half,
    values: Half,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`attend` over rows that are stored so. Each half is read by a product of its own, quantised or not."""
    batch, n_heads, n_tokens, head_dim = queries.shape
    n_kv_heads, n_rows = one_array(keys).shape[1:3]
    n_shared = n_heads // n_kv_heads
    # The query heads that share a KV head are rows of one product, so no row is read twice.
    grouped = (queries * scale).reshape(batch, n_kv_heads, n_shared * n_tokens, head_dim)
    logits = widths.logits(grouped, keys)
    logits = _masked(logits.reshape(batch, n_heads, n_tokens, n_rows), mask)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(logits.dtype)[:, None, None], (batch, n_heads, n_tokens, 1))
        logits = mx.concatenate([logits, column], axis=-1)
    weights = mx.softmax(logits, axis=-1, precise=True)[..., :n_rows]
    weights = weights.reshape(batch, n_kv_heads, n_shared * n_tokens, n_rows)
    output = widths.weighted(weights, values)
    return output.reshape(batch, n_heads, n_tokens, -1)


def _masked(logits: mx.array, mask: mx.array | str | None) -> mx.array:
    if mask is None:
        return logits
    if isinstance(mask, str):
        n_tokens, n_rows = logits.shape[-2:]
        mask = mx.arange(n_rows - n_tokens, n_rows)[:, None] >= mx.arange(n_rows)
    if mask.dtype == mx.bool_:
        return mx.where(mask, logits, mx.finfo(logits.dtype).min)
    return logits + mask.astype(logits.dtype)

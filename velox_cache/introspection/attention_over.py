"""The attention that a block's queries give to the rows before it."""

import mlx.core as mx

from velox_cache.introspection.observed_prefill import LayerQueries


def attention_over(call: LayerQueries, rows: mx.array, queries: slice = slice(None)) -> mx.array:
    """Softmax weights float32 [H,G,S,n] of a block's queries on n rows before it, G query heads per KV head.

    The softmax goes over these rows, the block's own, which stand last, and the model's learned attention sinks. Those
    of the block and the sinks take their part of it and are left out.

    Args:
        call: what the query tap saw.
        rows: int [n], which of the rows before the block take part.
        queries: which of the block's queries.

    Raises:
        ValueError: something else enters the model's softmax beside the logits.
    """
    if others := call.terms.keys() - {"sinks"}:
        raise ValueError(
            f"the model's attention adds {', '.join(sorted(others))} to its logits (the rotary part of latent "
            "attention), which is not computed again here; take a method that scores as tokens come"
        )
    n_seen, n_tokens = call.keys.shape[2], call.queries.shape[2]
    own = mx.arange(n_seen - n_tokens, n_seen)
    at = mx.concatenate([rows.astype(own.dtype), own])
    keys = call.keys[0][:, at].astype(mx.float32)
    asked = call.queries[0, :, queries].astype(mx.float32) * call.scale
    n_asked = asked.shape[1]
    grouped = asked.reshape(keys.shape[0], -1, keys.shape[-1])  # one product per KV head
    logits = (grouped @ keys.swapaxes(-1, -2)).reshape(keys.shape[0], -1, n_asked, at.shape[0])
    logits = mx.where(at <= own[queries][:, None], logits, -mx.inf)
    if "sinks" in call.terms:
        sinks = call.terms["sinks"].astype(mx.float32).reshape(keys.shape[0], -1, 1, 1)
        logits = mx.concatenate([logits, mx.broadcast_to(sinks, (*logits.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(logits, axis=-1)
    return weights[..., : rows.shape[0]]

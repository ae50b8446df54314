"""How well a score of cached keys predicts the attention that they will receive."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.texts import held_out_text
from velox_cache.introspection.observed_prefill import observed_prefill

# (layer, keys [H,n,D], values [H,n,D_v]) -> scores [H,n]; a higher score says the key matters more.
Scorer = Callable[[int, mx.array, mx.array], mx.array]


def true_mean_attention(
    queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None = None, mask: mx.array | None = None
) -> mx.array:
    """Attention that each key of a causal sequence receives, float32 [H,N].

    For the key at position t: its softmax weight, averaged over the queries at positions >= t (the only ones that see
    it) and over the query heads of its group. From queries [H_q,N,D], keys [H,N,D], attention's own `scale`, the
    model's learned attention sinks [H_q] where it has them, and the numbers `mask`, of a shape that broadcasts to
    [H_q,N,N], that it adds to its logits.

    Raises ValueError when the shapes do not fit.
    """
    n_heads, n_tokens, head_dim = queries.shape
    n_kv_heads = keys.shape[0]
    if keys.shape[1:] != (n_tokens, head_dim) or n_heads % n_kv_heads:
        raise ValueError(
            f"queries must be [H_q,N,D] and keys [H,N,D] with H_q a multiple of H, got {tuple(queries.shape)} and "
            f"{tuple(keys.shape)}"
        )
    grouped = queries.astype(mx.float32).reshape(n_kv_heads, -1, n_tokens, head_dim)
    logits = scale * (grouped @ keys.astype(mx.float32)[:, None].swapaxes(-1, -2))
    if mask is not None:
        everywhere = mx.broadcast_to(mask.astype(mx.float32), (n_heads, n_tokens, n_tokens))
        logits = logits + everywhere.reshape(logits.shape)
    causal = mx.tri(n_tokens, dtype=mx.bool_)
    logits = mx.where(causal, logits, -mx.inf)
    if sinks is None:
        weights = mx.softmax(logits, axis=-1)
    else:
        beside = mx.broadcast_to(sinks.astype(mx.float32).reshape(n_kv_heads, -1, 1, 1), (*logits.shape[:-1], 1))
        weights = mx.softmax(mx.concatenate([logits, beside], axis=-1), axis=-1)[..., :-1]
    return weights.sum((1, 2)) / (weights.shape[1] * mx.arange(n_tokens, 0, -1))


def spearman(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Spearman's rank correlation along the last axis, float64 [...], of a and b [...,n]; ties share their mean rank.

    0 where either side does not vary. Raises ValueError when the shapes differ or n < 2.
    """
    if a.shape != b.shape or a.ndim == 0 or a.shape[-1] < 2:
        raise ValueError(f"rank correlation needs two arrays of one shape [...,n], n >= 2, got {a.shape} and {b.shape}")
    rank_a, rank_b = _centred_ranks(a), _centred_ranks(b)
    spread = np.sqrt((rank_a**2).sum(-1) * (rank_b**2).sum(-1))
    varies = spread > 0
    return np.where(varies, (rank_a * rank_b).sum(-1) / np.where(varies, spread, 1), 0)


def attention_correlation(
    model: nn.Module,
    tokenizer: Tokenizer,
    text: str,
    scorers: Mapping[str, Scorer],
    *,
    n_tokens: int = 512,
    skip_first: int = 4,
    skip_last: int = 64,
) -> dict[str, np.ndarray[Any, Any]]:
    """Spearman correlation of each score with true mean attention, per KV head.

    Runs the first `n_tokens` tokens of `text` and leaves out the first `skip_first` keys (they draw attention whatever
    they say) and the last `skip_last` (few queries see them). Returns per scorer a float64 array over all KV heads of
    the layers with a plain KV cache, in layer order; its mean is the number that the Q-Filters paper's figure 4 shows.

    Raises ValueError when the text is too short, when the model's queries cannot be observed, or when its softmax has
    terms other than attention sinks and numbers that are added to the logits.
    """
    tokens = list(tokenizer.encode(text))[:n_tokens]
    if len(tokens) < n_tokens or n_tokens < skip_first + skip_last + 2:
        raise ValueError(
            f"the text holds {len(tokens)} tokens; n_tokens={n_tokens} are needed, and at least two beside the "
            f"{skip_first} first and {skip_last} last keys that are left out"
        )
    counted = slice(skip_first, n_tokens - skip_last)
    found: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in scorers}
    for block in observed_prefill(model, tokens, prefill_step_size=n_tokens):
        for call in block:
            if others := call.terms.keys() - {"sinks", "mask"}:
                raise ValueError(
                    f"the attention of layer {call.layer} takes {', '.join(map(repr, sorted(others)))} into its "
                    "softmax, which is not computed again here; leave this model out"
                )
            keys, values = call.keys[0], call.values[0]
            mask = call.terms.get("mask")
            added = None if mask is None else mask.reshape(-1, *mask.shape[-2:])
            sinks = call.terms.get("sinks")
            truth = np.array(true_mean_attention(call.queries[0], keys, call.scale, sinks, added))
            for name, score in scorers.items():
                scores = np.array(score(call.layer, keys, values).astype(mx.float32))
                found[name].append(spearman(scores[:, counted], truth[:, counted]))
    return {name: np.concatenate(per_layer) for name, per_layer in found.items()}


def predicts_attention(model: nn.Module, tokenizer: Tokenizer, calibration: Calibration) -> float | None:
    """How well the filters foretell the attention that the keys of 512 tokens receive, text that nobody calibrates on.

    The mean over heads of the rank correlation: 0 is chance, 1 is perfect. None where it cannot be measured, as in
    models whose softmax has terms of its own.
    """

    filters = {layer: one for layer, one in enumerate(calibration.filters) if one is not None}

    def projection(layer: int, keys: mx.array, values: mx.array) -> mx.array:
        return (keys * filters[layer][:, None]).sum(-1)

    try:
        found = attention_correlation(model, tokenizer, held_out_text(), {"projection": projection})
    except ValueError:
        return None
    return float(found["projection"].mean())


def _centred_ranks(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = x.reshape(-1, x.shape[-1])
    ranks = np.empty(flat.shape, np.float64)
    for row, values in zip(ranks, flat, strict=True):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        row[:] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    centred: np.ndarray[Any, Any] = (ranks - ranks.mean(-1, keepdims=True)).reshape(x.shape)
    return centred

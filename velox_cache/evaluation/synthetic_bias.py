"""Q-Filters on a made-up model's heads whose queries have a bias, where it is known which keys get attention.

Queries are Gaussian around a drift along an axis of their head, plus a bias against it, `size` times as long. Keys are
Gaussian. Attention sees queries with their bias. A filter is calibrated on other queries, before the bias or after it.
Keys are not turned by position here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from velox_cache.calibration.predicted_attention import spearman
from velox_cache.evaluation.anisotropy import head_anisotropy
from velox_fn.directions.query_gram import query_gram_filters, query_gram_init, query_gram_update

HEADS, HEAD_DIM, N_TOKENS, DRIFT = 8, 64, 512, 4.0


@dataclass(frozen=True)
class BiasRow:
    """One way to calibrate, at one size of the bias."""

    bias: float  # times the drift, against it
    calibrated: str  # before or after the bias
    positive_share: float  # of heads whose unseen queries project positively on their filter: the sign-agreement check
    attention_correlation: float  # Spearman, of the projection with the attention that keys get, mean over heads
    l2norm_correlation: float  # the same of minus the key's norm, which needs no calibration


def synthetic_bias(sizes: Sequence[float] = (0.0, 0.5, 2.0), seed: int = 0) -> list[BiasRow]:
    """Both ways to calibrate at each size. The same arguments give the same numbers."""
    rng = np.random.default_rng(seed)
    axes = rng.normal(size=(HEADS, 1, HEAD_DIM))
    axes /= np.linalg.norm(axes, axis=-1, keepdims=True)
    fitted, unseen, keys = rng.normal(size=(3, HEADS, N_TOKENS, HEAD_DIM))
    found = []
    for size in sizes:
        before, after = DRIFT * axes, (1 - size) * DRIFT * axes
        logits = (unseen + after) @ keys.swapaxes(-1, -2) / np.sqrt(HEAD_DIM)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        received = (weights / weights.sum(-1, keepdims=True)).mean(1)
        seen = query_gram_update(query_gram_init(HEADS, HEAD_DIM), mx.array((unseen + after).astype(np.float32)))
        norms = spearman(-np.square(keys).sum(-1), received)
        for name, mean in (("before", before), ("after", after)):
            gram = query_gram_update(query_gram_init(HEADS, HEAD_DIM), mx.array((fitted + mean).astype(np.float32)))
            filters = np.array(query_gram_filters(gram))
            found.append(
                BiasRow(
                    bias=size,
                    calibrated=name,
                    positive_share=head_anisotropy(gram, seen).positive_share,
                    attention_correlation=float(spearman((keys * filters[:, None]).sum(-1), received).mean()),
                    l2norm_correlation=float(norms.mean()),
                )
            )
    return found

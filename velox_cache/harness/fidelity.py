"""How closely a bounded cache follows the full one."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.harness.reading import Reading


@dataclass(frozen=True)
class Fidelity:
    """Two readings of one passage, compared."""

    agreement: float  # share of tokens whose most likely next token is the same
    kl_divergence: float  # mean of KL(reference || reading), in nats per token


def fidelity(reading: Reading, reference: Reading) -> Fidelity:
    """Compare a reading with that of the full cache. More sensitive than perplexity, which luck may lower.

    Raises ValueError when they are not of the same passage.
    """
    if reading.targets.shape != reference.targets.shape or not mx.array_equal(reading.targets, reference.targets):
        raise ValueError("the two readings are of different passages; read the same tokens with the same n_context")
    same, divergence = token_fidelity(reading.logprobs, reference.logprobs)
    return Fidelity(float(same.mean()), float(divergence.mean(dtype=np.float64)))


def token_fidelity(logprobs: mx.array, reference: mx.array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of distributions [...,V] each: whether the most likely token is the same, and KL(reference || logprobs)."""
    same = logprobs.argmax(-1) == reference.argmax(-1)
    terms = mx.exp(reference) * (reference - logprobs)
    # A token that the reference rules out (-inf) adds nothing; 0 * inf would be NaN.
    divergence = mx.where(reference == -mx.inf, 0, terms).sum(-1)
    return np.array(same), np.array(divergence)

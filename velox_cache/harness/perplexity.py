"""Perplexity of a passage under a cache."""

from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.harness.reading import Reading


def perplexity(reading: Reading) -> float:
    """exp of the mean negative log-likelihood of the passage's tokens; the mean is taken in float64."""
    return perplexity_of(token_losses(reading.logprobs, reading.targets))


def perplexity_of(losses: np.ndarray[Any, Any]) -> float:
    """Perplexity from the negative log-likelihoods of single tokens."""
    return float(np.exp(losses.mean(dtype=np.float64)))


def token_losses(logprobs: mx.array, targets: mx.array) -> np.ndarray[Any, Any]:
    """Negative log-likelihood float32 [N] of the tokens `targets` int32 [N] under `logprobs` float32 [N,V]."""
    return np.array(-mx.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0])

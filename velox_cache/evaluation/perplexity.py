"""Perplexity."""

import mlx.core as mx
import numpy as np

from velox_cache.evaluation.reading import Reading


def perplexity(reading: Reading) -> float:
    """exp of the mean negative log-likelihood of the passage's tokens; the mean is taken in float64."""
    chosen = mx.take_along_axis(reading.logprobs, reading.targets[:, None], axis=-1)
    return float(np.exp(-np.array(chosen).mean(dtype=np.float64)))

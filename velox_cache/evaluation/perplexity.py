"""Perplexity."""

import mlx.core as mx

from velox_cache.evaluation.reading import Reading


def perplexity(reading: Reading) -> float:
    """exp of the mean negative log-likelihood of the passage's tokens; the mean is taken in float32."""
    chosen = mx.take_along_axis(reading.logprobs, reading.targets[:, None], axis=-1)
    return float(mx.exp(-chosen.mean()).item())

"""How well each method's score predicts the attention that a key will receive, per head."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.predicted_attention import Scorer, attention_correlation
from velox_cache.introspection.observed_prefill import cache_layout
from velox_fn.directions.key_svd import estimate_filter_dir
from velox_fn.engine.scorers import unit_keys

FALLBACK_KEYS = 128


@dataclass(frozen=True, eq=False)
class ScorerCorrelation:
    """Spearman correlation of one score with true mean attention."""

    scorer: str
    per_head: np.ndarray[Any, Any]  # float64 [layers, H]

    @property
    def mean(self) -> float:
        return float(self.per_head.mean())

    @property
    def sign_correct(self) -> float:
        """Share of heads whose correlation is positive."""
        return float((self.per_head > 0).mean())


def default_scorers(calibration: Calibration) -> dict[str, Scorer]:
    """The scores of the static methods, and of KeyDiff against the mean of all keys."""

    def calibrated(layer: int, keys: mx.array, values: mx.array) -> mx.array:
        filters = calibration.filters[layer]
        if filters is None:
            raise ValueError(f"the calibration has no filters for layer {layer}; calibrate this model")
        return (keys * filters[:, None]).sum(-1)

    return {
        "qfilters": calibrated,
        "qfilters:calibrated=false": lambda layer, keys, values: (
            keys * estimate_filter_dir(keys[:, :FALLBACK_KEYS])[:, None]
        ).sum(-1),
        "l2norm": lambda layer, keys, values: -mx.square(keys.astype(mx.float32)).sum(-1),
        "keydiff": lambda layer, keys, values: -(unit_keys(keys) * unit_keys(keys).mean(1, keepdims=True)).sum(-1),
        "streaming_llm": lambda layer, keys, values: mx.broadcast_to(mx.arange(keys.shape[1]), keys.shape[:2]),
    }


def score_attention(
    model: nn.Module, tokenizer: Tokenizer, text: str, scorers: Mapping[str, Scorer], *, n_tokens: int = 512
) -> list[ScorerCorrelation]:
    """Correlation of each scorer with true mean attention over the first `n_tokens` of `text`; highest mean first.

    Raises ValueError as `attention_correlation` does.
    """
    found = attention_correlation(model, tokenizer, text, scorers, n_tokens=n_tokens)
    layers = sum(bool(re.search(r"\bKVCache\b", name)) for name in cache_layout(model))
    results = [ScorerCorrelation(name, per_head.reshape(layers, -1)) for name, per_head in found.items()]
    return sorted(results, key=lambda result: -result.mean)

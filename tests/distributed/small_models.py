"""The models that every rank builds alike, and how a rank gets its part of one."""

import importlib
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache import QFiltersCalibration

HEAD_DIM = 8
CONFIG = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}


class CharacterTokenizer:
    """One token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 97 for character in text]


def small_model(spread: str, model_type: str = "qwen2") -> nn.Module:
    """A random model, this rank's part of it when `spread` is "heads" or "layers"."""
    arch = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(0)
    model = arch.Model(arch.ModelArgs.from_dict({"model_type": model_type} | CONFIG))
    mx.eval(model.parameters())
    if spread == "heads":
        model.shard(mx.distributed.init())
    if spread == "layers":
        model.model.pipeline(mx.distributed.init())
    mx.eval(model.parameters())
    return model.eval()


def some_filters() -> QFiltersCalibration:
    """Filters for the whole model, of no particular meaning."""
    shape = (CONFIG["num_key_value_heads"], HEAD_DIM)
    drawn = [mx.random.normal(shape, key=mx.random.key(layer)) for layer in range(CONFIG["num_hidden_layers"])]
    return QFiltersCalibration([layer / mx.linalg.norm(layer, axis=-1, keepdims=True) for layer in drawn])


def arguments() -> tuple[Any, ...]:
    """A rank's number, and what its script was given."""
    return (mx.distributed.init().rank(), *sys.argv[1:])

"""The models that every rank builds alike, and how a rank gets its part of one."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from velox_cache import Calibration

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


def some_filters() -> Calibration:
    """Filters for the whole model, of no particular meaning."""
    shape = (CONFIG["num_key_value_heads"], HEAD_DIM)
    drawn = [mx.random.normal(shape, key=mx.random.key(layer)) for layer in range(CONFIG["num_hidden_layers"])]
    return Calibration([layer / mx.linalg.norm(layer, axis=-1, keepdims=True) for layer in drawn])


def arguments() -> tuple[Any, ...]:
    """A rank's number, and what its script was given."""
    return (mx.distributed.init().rank(), *sys.argv[1:])


def save_small_model(folder: Path) -> Path:
    """The whole model as files that mlx_lm can load, with a tokenizer of one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: CONFIG["vocab_size"]]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {  # large projections, so that the text does not repeat one letter
        name: 4 * array if "proj.weight" in name else array
        for name, array in tree_flatten(small_model("none").parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for name, content in {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": {"model_type": "qwen2", "eos_token_id": 0} | CONFIG,
        "model.safetensors.index.json": {"weight_map": dict.fromkeys(weights, "model.safetensors")},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder

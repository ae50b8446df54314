"""Small random models of several architectures, built in memory, and a tokenizer that needs no files."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from velox_cache.introspection.query_tap import ATTENTION

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
PARTICULARS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "mixtral": {"num_local_experts": 4},
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


@pytest.fixture(autouse=True)
def no_tap_outlives_its_test() -> Iterator[None]:
    """Models of one architecture share the code that `install` taps: one left there would serve the next test."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models."):
            for tap in getattr(getattr(module, ATTENTION, None), "taps", ()):
                tap.remove()


@pytest.fixture
def tiny_model() -> Callable[..., nn.Module]:
    """`tiny_model("llama", num_hidden_layers=3, seed=1)`: a random model with float32 weights of the scale of one."""

    def build(model_type: str = "llama", *, seed: int = 0, **changes: Any) -> nn.Module:
        arch = importlib.import_module(f"mlx_lm.models.{model_type}")
        mx.random.seed(seed)
        config = {"model_type": model_type} | SIZES | PARTICULARS.get(model_type, {}) | changes
        model = arch.Model(arch.ModelArgs.from_dict(config))
        mx.eval(model.parameters())
        return model.eval()

    return build


class CharacterTokenizer:
    """One token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 97 for character in text]


@pytest.fixture
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()


@pytest.fixture
def first_layer_queries() -> Callable[..., np.ndarray]:
    """Queries [H_q,N,D] of the first layer of a tiny llama or qwen3 in numpy; `rotated=False` leaves RoPE out."""

    def compute(model: nn.Module, tokens: list[int], rotated: bool = True) -> np.ndarray:
        layer, dim = model.model.layers[0], SIZES["head_dim"]

        def rms_norm(x: np.ndarray, weight: mx.array) -> np.ndarray:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + SIZES["rms_norm_eps"]) * np.array(weight)

        hidden = rms_norm(np.array(model.model.embed_tokens.weight)[tokens], layer.input_layernorm.weight)
        queries = (hidden @ np.array(layer.self_attn.q_proj.weight).T).reshape(len(tokens), -1, dim).swapaxes(0, 1)
        if "q_norm" in layer.self_attn:
            queries = rms_norm(queries, layer.self_attn.q_norm.weight)
        if not rotated:
            return queries
        half = dim // 2
        angle = np.arange(len(tokens))[:, None] * SIZES["rope_theta"] ** (-np.arange(half) / half)
        first, second = queries[..., :half], queries[..., half:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)], axis=-1
        )

    return compute

"""How llama.cpp names and stores the models that we read, and the mlx_lm configuration that they need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Metadata = Mapping[str, Any]

_SHARED_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One GGUF architecture.

    layer_names: llama.cpp's name of a layer's tensor to mlx_lm's, both without `.weight`.
    config: makes mlx_lm's config.json from the GGUF metadata.
    interleaved: names of the layer tensors whose rows llama.cpp stores with the two halves of each head interleaved,
        to the config key that counts their heads.
    norm_shift: what llama.cpp added to the norm weights, to take off again.
    """

    layer_names: Mapping[str, str]
    config: Callable[[Metadata], dict[str, Any]]
    interleaved: Mapping[str, str]
    norm_shift: float

    def mlx_name(self, name: str) -> str:
        """mlx_lm's name of the GGUF tensor `name` (`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj`).

        Raises ValueError for a tensor that this architecture does not have.
        """
        match name.removesuffix(".weight").split("."):
            case ["blk", layer, part] if part in self.layer_names:
                return f"model.layers.{layer}.{self.layer_names[part]}"
            case [part] if part in _TOP_NAMES:
                return _TOP_NAMES[part]
        raise ValueError(f"the GGUF has a tensor {name!r} that this converter does not know")


def architecture_of(metadata: Metadata) -> Architecture:
    """The architecture of a GGUF file. Raises ValueError, naming those known, when it is another one."""
    name = metadata["general.architecture"]
    if name not in _ARCHITECTURES:
        raise ValueError(f"GGUF architecture {name!r} is not supported; known: {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[name]


def _shared_config(metadata: Metadata, prefix: str) -> dict[str, Any]:
    return {
        "hidden_size": metadata[f"{prefix}.embedding_length"],
        "num_hidden_layers": metadata[f"{prefix}.block_count"],
        "intermediate_size": metadata[f"{prefix}.feed_forward_length"],
        "num_attention_heads": metadata[f"{prefix}.attention.head_count"],
        "num_key_value_heads": metadata[f"{prefix}.attention.head_count_kv"],
        # Stored as float32: 1e-05 comes back as 9.99999974e-06.
        "rms_norm_eps": float(f"{metadata[f'{prefix}.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata[f"{prefix}.rope.freq_base"],
        "max_position_embeddings": metadata[f"{prefix}.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _llama_config(metadata: Metadata) -> dict[str, Any]:
    return _shared_config(metadata, "llama") | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _gemma3_config(metadata: Metadata) -> dict[str, Any]:
    head_dim = metadata["gemma3.attention.key_length"]
    return _shared_config(metadata, "gemma3") | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata["gemma3.attention.sliding_window"],
        # The next three are fixed by the published Gemma 3 configurations up to 12B; the GGUF leaves them out.
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": head_dim,
    }


_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            layer_names=_SHARED_NAMES | {"ffn_norm": "post_attention_layernorm"},
            config=_llama_config,
            interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
            norm_shift=0.0,
        ),
        "gemma3": Architecture(
            layer_names=_SHARED_NAMES
            | {
                "attn_q_norm": "self_attn.q_norm",
                "attn_k_norm": "self_attn.k_norm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
            config=_gemma3_config,
            interleaved={},
            norm_shift=1.0,
        ),
    }
)

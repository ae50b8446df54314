"""Arguments of small models: what a field of a name is in most architectures, and what single ones need besides."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCABULARY = 64
WINDOW = 16  # rows of a sliding window or of a chunk

_MIXED = ["sliding_attention", "full_attention"]
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
_SCALED_QUERIES = {"rope_theta": 1000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
_BY_KIND = {
    kind: {"rope_theta": theta, "rope_type": "default"} for kind, theta in zip(_MIXED, (100.0, 1000.0), strict=True)
}
_CONVOLUTIONAL = {"layer_types": ["conv", "full_attention"], "block_dim": 32, "block_ff_dim": 48}
_NEVER_MIXED = {"layer_types": None, "sliding_window": None}
_DELTA = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3}

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_theta": 1000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "layer_types": _MIXED,
        "rotary_dim": 4,
        "partial_rotary_factor": 0.5,
        # Mixtures of experts
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_dense_layers": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_layer_freq": 1,
        "moe_topk": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_expert_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        # Latent attention
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
        # Recurrent parts
        "state_size": 8,
        "conv_kernel": 3,
        "conv_L_cache": 3,
        "mamba_d_conv": 3,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "layer_group_size": 2,
        # The names that GPT-2 and its kin use
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 512,
        "n_ctx": 512,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
)

# "wraps" names the architecture whose arguments are the model's text_config.
PARTICULARS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "afm7": {"hidden_dim": 32, "num_layers": 3, "num_kv_reuse_layers": 1},
        "dbrx": {
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1000.0},
        },
        "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "gready"},
        "deepseek_v41": {"o_groups": 2, "o_lora_rank": 16, "hc_mult": 2},
        "exaone4": {"sliding_window_pattern": "LG"},
        "exaone_moe": {"is_moe_layer": [False, True]},
        "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 16},
        "gear": {"num_hidden_layers": 3, "layer_types": ["conv_mixer", *_MIXED]},
        "gemma3": {"wraps": "gemma3_text"},
        "gemma3_text": {"query_pre_attn_scalar": 8},
        "gemma3n": {
            "text_config": {
                "num_hidden_layers": 4,
                "layer_types": _MIXED * 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCABULARY,
                "rope_local_base_freq": 100.0,
                "final_logit_softcapping": 30.0,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "hidden_size_per_layer_input": 8,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            }
        },
        "gemma4": {"wraps": "gemma4_text"},
        "gemma4_text": {
            "num_hidden_layers": 4,
            "layer_types": _MIXED * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 16,
        },
        "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1000.0}},
        "gpt_bigcode": {"n_inner": 48},
        "granitemoehybrid": {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "shared_intermediate_size": 48,
        },
        "hunyuan": {
            "num_hidden_layers": 4,
            "rope_scaling": {"alpha": 1.5, "factor": 1.0, "type": "dynamic"},
            "use_cla": True,
            "cla_share_factor": 2,
        },
        "jamba": {
            "layers_block_type": ["mamba", "attention"],
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
        },
        "kimi_k25": {"wraps": "deepseek_v3"},
        "kimi_k3": {
            "text_config": {
                "linear_attn_config": _DELTA,
                "activation_situ_beta": 1.0,
                "routed_expert_hidden_size": 16,
                "mla_use_output_gate": True,
            }
        },
        "kimi_linear": {"linear_attn_config": _DELTA},
        "kimi_vl": {"wraps": "deepseek_v3"},
        "lfm2": _CONVOLUTIONAL,
        "lfm2-vl": {"wraps": "lfm2"},
        "lfm2_moe": _CONVOLUTIONAL,
        "lille-130m": {"n_embd": 64, "n_kv_heads": 2, "block_size": 512},
        "llama": _NEVER_MIXED,
        "llama4": {
            "text_config": {
                "num_hidden_layers": 4,
                "intermediate_size_mlp": 48,
                "attention_chunk_size": WINDOW,
                "interleave_moe_layer_step": 2,
                "num_experts_per_tok": 1,
                "use_qk_norm": True,
                "attention_bias": False,
            }
        },
        "llama4_text": {"no_rope_layers": [1, 0], "intermediate_size_mlp": 48, "use_qk_norm": True},
        "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
        "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 4},
        "mamba2": {"time_step_limit": (0.001, 100.0)},
        "mellum": {"rope_parameters": _BY_KIND},
        "mimo_v2_flash": {
            "hybrid_layer_pattern": [1, 0],
            "moe_layer_freq": [0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": True,
            "sliding_window_size": WINDOW,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 100.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "swa_v_head_dim": 8,
        },
        "minicpm3": {
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 512,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 1.1, 1.2, 1.3],
            }
        },
        "minimax_m3_vl": {
            "text_config": {
                "layer_types": None,
                "moe_layer_freq": [0, 1],
                "dense_intermediate_size": 48,
                "shared_intermediate_size": 16,
                "index_head_dim": 8,
                "index_block_size": 4,
                "index_topk_blocks": 2,
                "sparse_attention_freq": [0, 1],
            }
        },
        "ministral3": {"rope_parameters": _SCALED_QUERIES},
        "mistral3": {"wraps": "llama"},
        "mistral4": {"rope_parameters": _YARN | _SCALED_QUERIES},
        "muse_spark": {
            "text_config": {
                "rope_parameters": {"rope_theta": 1000.0},
                "layer_rope_theta": [1000.0, 0.0],
                "post_norm_eps": 1e-5,
                "final_logit_softcapping": 20.0,
                "output_multiplier": 1.0,
                "moe_hidden_size": 16,
                "num_shared_experts": 0,
            }
        },
        "nemotron-nas": {
            "num_hidden_layers": 3,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            ],
        },
        "nemotron_h": {
            "hybrid_override_pattern": ["M", "*", "E", "-"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
        },
        "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
        "olmo": {"d_model": 32, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 48, "embedding_size": VOCABULARY},
        "openelm": {
            "num_transformer_layers": 2,
            "model_dim": 32,
            "ffn_dim_divisor": 8,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 2],
            "ffn_multipliers": [1.0, 1.5],
        },
        "phi3small": {
            "vocab_size": 100352,
            "dense_attention_every_n_layers": 2,
        },  # it masks tokens by their published ids
        "phixtral": {"model_dim": 32, "num_vocab": VOCABULARY},
        "pixtral": {"wraps": "llama"},
        "plamo": {"n_shared_head": 2},
        "plamo2": {"hidden_size_per_head": 8, "mamba_num_heads": 4, "mamba_chunk_size": 16},
        "prism_hadamard_qwen35": {
            "text_config": {"num_experts": 0, "intermediate_size": 128},
            "schema_version": 1,
            "tensor_namespace": "mlx-lm-text",
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": [{"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
        },
        "qwen": {"kv_channels": 8},
        "qwen2_vl": {"wraps": "qwen2"},
        "qwen3_vl": {"wraps": "qwen3"},
        "qwen3_vl_moe": {"wraps": "qwen3_moe"},
        "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
        "spark2_5": {"rope_parameters": _BY_KIND},
        "step3p5": {
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 16,
            "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        },
    }
)

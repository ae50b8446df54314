"""Models that mix kinds of attention: full-attention layers are bounded, the rest is left as the model made it."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import velox_cache as vc
from velox_cache.cli.main import main
from velox_cache.introspection.query_tap import flat_caches
from velox_cache.models import default_cache_dir

PROMPT = [(11 * i) % 97 for i in range(90)]
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
INDEXED = MLA | {
    "num_key_value_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "first_k_dense_replace": 9,
    "rope_parameters": {"rope_theta": 1000.0},
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
}
LLAMA4 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "rope_scaling": None,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_chunk_size": 16,
    "interleave_moe_layer_step": 2,
    "model_type": "llama4_text",
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "use_qk_norm": True,
}
BOUNDED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "gemma3_text": ({}, [1]),
    "gpt_oss": ({"num_hidden_layers": 4}, [1, 3]),
    "ministral3": (
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_theta": 1000.0,
                "rope_type": "default",
                "original_max_position_embeddings": 4096,
                "llama_4_scaling_beta": 0.1,
            },
        },
        [1, 3],
    ),
    "llama4": ({"text_config": LLAMA4}, [3]),
    "qwen3_next": (
        {
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [],
            "moe_intermediate_size": 16,
            "partial_rotary_factor": 0.5,
        },
        [3],
    ),
    "falcon_h1": ({}, [0, 1]),
    "deepseek_v2": (
        MLA | {"num_key_value_heads": 4, "first_k_dense_replace": 9, "rope_scaling": YARN, "q_lora_rank": None},
        [0, 1],
    ),
    "deepseek_v3": ({}, [0, 1]),
    "llama": (
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
        [1, 3],
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v32": (INDEXED, "indexer"),
    "glm_moe_dsa": (INDEXED, "indexer"),
    "phi3small": (
        {
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 48,
            "gegelu_limit": 20.0,
            "layer_norm_epsilon": 1e-5,
        },
        "block-sparse",
    ),
    "afm7": (
        {"hidden_dim": 32, "num_layers": 3, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "position of their queries",
    ),
    "mamba2": (
        {
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 3,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": False,
            "time_step_limit": (0.0, 1.0),
            "time_step_rank": "auto",
        },
        "recurrent",
    ),
}


@pytest.fixture(params=BOUNDED)
def hybrid(request: pytest.FixtureRequest, tiny_model: Callable[..., nn.Module]) -> tuple[nn.Module, list[int]]:
    changes, bounded = BOUNDED[request.param]
    return tiny_model(request.param, **changes), bounded


def greedy(model: nn.Module, prompt: list[int], n_tokens: int, **options: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=n_tokens, **options)
    return [int(token) for token, _ in steps]


def test_full_attention_layers_are_bounded_and_the_report_says_so(hybrid: tuple[nn.Module, list[int]]) -> None:
    model, bounded = hybrid
    report = vc.install(model, "qfilters", budget=24, calib_tokens=8)
    assert [entry.layer for entry in report.layers if entry.bounded] == bounded
    assert all(entry.reason for entry in report.layers)
    caches = make_prompt_cache(model)
    kinds = [any(isinstance(part, vc.EvictingKVCache) for part in flat_caches([cache])) for cache in caches]
    assert [layer for layer, evicting in enumerate(kinds) if evicting] == bounded


def test_other_layers_keep_the_caches_that_the_model_makes(hybrid: tuple[nn.Module, list[int]]) -> None:
    model, _ = hybrid
    own = [type(part) for part in flat_caches(make_prompt_cache(model))]
    vc.install(model, "qfilters", budget=24, calib_tokens=8)
    installed = [type(part) for part in flat_caches(make_prompt_cache(model))]
    assert [new if old is not KVCache else KVCache for old, new in zip(own, installed, strict=True)] == own


def test_logits_within_budget_are_those_of_the_plain_model(hybrid: tuple[nn.Module, list[int]]) -> None:
    model, _ = hybrid
    outputs = []
    for evicting in (False, True):
        if evicting:
            vc.install(model, "qfilters", budget=200, calib_tokens=8)
        caches = make_prompt_cache(model)
        blocks = [PROMPT[:40], PROMPT[40:41], PROMPT[41:60], PROMPT[60:61]]
        outputs.append([model(mx.array([block]), cache=caches) for block in blocks])
    assert all(mx.array_equal(one, other) for one, other in zip(*outputs, strict=True))


def test_rows_stay_bounded_while_offsets_go_on(hybrid: tuple[nn.Module, list[int]]) -> None:
    model, bounded = hybrid
    vc.install(model, "qfilters", budget=24, calib_tokens=8)
    caches = make_prompt_cache(model)
    assert len(greedy(model, PROMPT, 30, prompt_cache=caches, prefill_step_size=32)) == 30
    evicting = [part for part in flat_caches(caches) if isinstance(part, vc.EvictingKVCache)]
    assert [(cache.size(), cache.offset) for cache in evicting] == [(24, len(PROMPT) + 30)] * len(bounded)


def test_ragged_batch_generates_what_each_prompt_does_alone(hybrid: tuple[nn.Module, list[int]]) -> None:
    model, _ = hybrid
    if any(type(cache).__name__ == "ChunkedKVCache" for cache in make_prompt_cache(model)):
        pytest.skip("mlx_lm does not batch chunked attention")
    vc.install(model, "qfilters", budget=24, calib_tokens=8)
    prompts = [PROMPT[:5], PROMPT, PROMPT[:40]]
    generator = BatchGenerator(model)
    uids = generator.insert(prompts, [15] * 3)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    assert [tokens[uid] for uid in uids] == [greedy(model, prompt, 15) for prompt in prompts]


@pytest.mark.parametrize("model_type", REFUSED)
def test_model_that_cannot_be_bounded_is_refused_with_the_reason(
    model_type: str, tiny_model: Callable[..., nn.Module]
) -> None:
    changes, reason = REFUSED[model_type]
    model = tiny_model(model_type, **changes)
    with pytest.raises(ValueError, match=reason):
        vc.install(model, "qfilters", budget=24)
    assert "make_cache" not in model.__dict__


@pytest.mark.parametrize("model_type", REFUSED)
def test_builder_leaves_a_refused_model_its_own_caches(model_type: str, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(model_type, **REFUSED[model_type][0])
    caches = vc.KVCacheBuilder.for_model(model, vc.KVCacheConfig(qfilters_budget=24))
    assert not any(isinstance(part, vc.EvictingKVCache) for part in flat_caches(caches))


def test_values_narrower_than_keys_are_counted_right(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("deepseek_v2", **BOUNDED["deepseek_v2"][0])
    vc.install(model, "qfilters", budget=24, calib_tokens=8)
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)
    heads, key_bytes, value_bytes, filter_bytes = 4, (16 + 8) * 4, 12 * 4, (16 + 8) * 4
    assert caches[0].kept_bytes == heads * (24 * (key_bytes + value_bytes) + filter_bytes)


def test_model_whose_queries_cannot_be_seen_is_refused_for_methods_that_want_them(
    tiny_model: Callable[..., nn.Module],
) -> None:
    model = tiny_model("gemma2", query_pre_attn_scalar=8)
    with pytest.raises(ValueError, match="queries"):
        vc.install(model, "tova", budget=24)
    assert "make_cache" not in model.__dict__


def test_model_whose_queries_cannot_be_seen_serves_with_keys_in_their_place(
    tiny_model: Callable[..., nn.Module],
) -> None:
    model = tiny_model("gemma2", query_pre_attn_scalar=8)
    vc.install(model, "tova", budget=24, queries="proxy")
    caches = make_prompt_cache(model)
    greedy(model, PROMPT, 5, prompt_cache=caches)
    assert [cache.size() for cache in caches] == [24, 24]


def test_layer_that_never_shows_its_queries_is_found_by_the_probe(
    tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    attention = model.layers[1].self_attn
    monkeypatch.setattr(type(attention), "__call__", _blind_to_the_tap(type(attention).__call__, attention))
    with pytest.raises(ValueError, match=r"layers \[1\]"):
        vc.install(model, "tova", budget=24)


def _blind_to_the_tap(call: Callable[..., Any], blind: nn.Module) -> Callable[..., Any]:
    """`call`, whose one module `blind` hands attention one row more than the view has."""

    class Copying:
        def __init__(self, cache: Any) -> None:
            self._cache = cache

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self._cache.update_and_fetch(keys, values)
            one_more = [(0, 0), (0, 0), (1, 0), (0, 0)]
            return mx.pad(keys, one_more), mx.pad(values, one_more)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._cache, name)

    def patched(self: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        return call(self, x, mask, Copying(cache) if self is blind else cache)

    return patched


def test_refused_install_takes_its_tap_away(
    tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    attention = model.layers[1].self_attn
    before = llama.scaled_dot_product_attention
    monkeypatch.setattr(type(attention), "__call__", _blind_to_the_tap(type(attention).__call__, attention))
    with pytest.raises(ValueError, match="queries"):
        vc.install(model, "tova", budget=24)
    assert llama.scaled_dot_product_attention is before


def test_inspect_model_prints_the_plan(
    tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("gemma3_text")
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (model, None))
    assert main(["inspect-model", "owner/gemma"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "full attention" in printed
    assert "a sliding window bounds itself" in printed
    assert "1 of 2 layers can be bounded" in printed


@pytest.mark.real_model
def test_gemma3_270m_generates_in_bounded_memory() -> None:
    model, tokenizer = mlx_lm.load(str(default_cache_dir() / "gemma3-270m-float32"))
    own = make_prompt_cache(model)
    report = vc.install(model, "qfilters", budget=128)
    caches = make_prompt_cache(model)
    prompt = tokenizer.encode("The capital of France is Paris. The capital of Italy is Rome. " * 15)
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20, prompt_cache=caches)
    assert "capital" in text
    for plain, cache, entry in zip(own, caches, report.layers, strict=True):
        assert entry.bounded == (not isinstance(plain, RotatingKVCache))
        if entry.bounded:
            assert cache.size() == 128
            assert cache.offset > len(prompt)

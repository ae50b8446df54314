"""Evicting caches with quantised rows, inside models: attention, batches, files, trims, speculative decoding."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from replies import in_one_batch, one_by_one

import velox_cache as vc
from velox_cache.architectures import tiny as architectures
from velox_fn import kept_positions, kv, quantised
from velox_fn.methods.l2norm import l2norm

PROMPT = [(11 * i * i + 5 * i) % 97 for i in range(70)]
WIDE: dict[str, Any] = {"head_dim": 32}
MIXED = {"key_bits": 8, "value_bits": 4, "group_size": 32}


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    return tiny_model(**WIDE)


def logits_of(model: nn.Module, caches: list[Any], calls: Sequence[int]) -> mx.array:
    """The logits of PROMPT in calls of these sizes."""
    outputs, start = [], 0
    for n_tokens in calls:
        outputs.append(model(mx.array([PROMPT[start : start + n_tokens]]), cache=caches))
        start += n_tokens
    return mx.concatenate(outputs, axis=1)


def stored_rows(caches: list[Any]) -> list[Any]:
    return [np.array(kept_positions(cache.record)) for cache in caches]


class ReadBack(vc.EvictingKVCache):
    """Hands attention the rows read back as arrays: what attention over quantised rows must equal."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        view = super().update_and_fetch(keys, values)
        return self._held.widths.read(*view)

    @property
    def bits(self) -> NoReturn:
        raise AttributeError


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("widths", [MIXED, {"bits": 4, "group_size": 32}], ids=["8/4", "4"])
def test_attention_equals_that_over_the_rows_read_back(
    tiny_model: Callable[..., nn.Module], model_type: str, widths: dict[str, Any]
) -> None:
    model = tiny_model(model_type, **WIDE, hidden_size=128)
    check_reads_as_read_back(model, widths)


@pytest.mark.parametrize("widths", [MIXED, {"bits": 4, "group_size": 32}], ids=["8/4", "4"])
def test_so_it_does_in_layers_that_read_the_rows_of_others(widths: dict[str, Any]) -> None:
    vocabulary = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97)
    check_reads_as_read_back(architectures.tiny_model("gemma4_text", **WIDE, global_head_dim=32, **vocabulary), widths)


def check_reads_as_read_back(model: nn.Module, widths: dict[str, Any]) -> None:
    vc.install(model, "l2norm", budget=24, **widths)
    caches = make_prompt_cache(model)
    read_back = [
        ReadBack(cache.method) if isinstance(cache, vc.EvictingKVCache) else copy.copy(cache)
        for cache in make_prompt_cache(model)
    ]
    calls = [40, 8, *[1] * 10]
    found, expected = logits_of(model, caches, calls), logits_of(model, read_back, calls)
    assert any(isinstance(cache, vc.EvictingKVCache) for cache in caches)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-3, atol=2e-4)


def test_one_width_needs_no_tap(model: nn.Module) -> None:
    method = quantised(l2norm(budget=24), key_bits=8, value_bits=8, group_size=32)
    calls = [40, *[1] * 10]
    plain = [vc.EvictingKVCache(method) for _ in model.layers]
    untapped = logits_of(model, plain, calls)
    vc.install(model, method)
    np.testing.assert_allclose(
        np.array(untapped), np.array(logits_of(model, make_prompt_cache(model), calls)), rtol=1e-4, atol=1e-5
    )


def test_the_same_rows_stay_as_unquantised(model: nn.Module) -> None:
    kept = []
    for bits in (None, 8):
        vc.install(model, "streaming_llm", budget=24, bits=bits, group_size=32)
        caches = make_prompt_cache(model)
        logits_of(model, caches, [30, *[1] * 30])
        kept.append(stored_rows(caches))
    assert all(np.array_equal(*pair) for pair in zip(*kept, strict=True))


@pytest.mark.parametrize("method", ["l2norm", "h2o", "snapkv", "curdkv", "tova", "keydiff", "cur", "random"])
@pytest.mark.parametrize("interval", [1, 16])
def test_every_method_generates(model: nn.Module, method: str, interval: int) -> None:
    vc.install(model, method, budget=40, interval=interval, **MIXED)
    caches = make_prompt_cache(model)
    list(generate_step(mx.array(PROMPT), model, max_tokens=24, prompt_cache=caches))
    assert caches[0].size() <= 40 + interval
    assert caches[0].compression_ratio > 2 * 93 / (40 + interval)
    assert mx.isfinite(kv(caches[0].record)[0]).all().item()


@pytest.mark.parametrize("interval", [1, 16])
def test_a_cache_goes_on_from_a_file_bit_for_bit(model: nn.Module, interval: int, tmp_path: Any) -> None:
    vc.install(model, "l2norm", budget=24, interval=interval, **MIXED)
    caches = make_prompt_cache(model)
    logits_of(model, caches, [16, 16, 8])
    vc.save_prompt_cache(tmp_path / "cache", caches)
    loaded = vc.load_prompt_cache(tmp_path / "cache")
    for token in PROMPT[40:60]:
        both = [model(mx.array([[token]]), cache=one) for one in (caches, loaded)]
        assert mx.array_equal(*both).item()
    assert [one.nbytes for one in caches] == [one.nbytes for one in loaded]


@pytest.mark.parametrize("interval", [1, 8])
def test_a_ragged_batch_generates_what_each_sequence_does_alone(model: nn.Module, interval: int) -> None:
    vc.install(model, "l2norm", budget=24, interval=interval, **MIXED)
    prompts = [PROMPT, PROMPT[7:29], PROMPT[3:8]]
    assert in_one_batch(model, prompts) == one_by_one(model, prompts)


def test_merge_and_extract_keep_each_sequence(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24, **MIXED)
    alone = [make_prompt_cache(model) for _ in range(2)]
    for caches, calls in zip(alone, ([50], [12]), strict=True):
        logits_of(model, caches, calls)
    merged = [vc.EvictingKVCache.merge(list(pair)) for pair in zip(*alone, strict=True)]
    for b, caches in enumerate(alone):
        for cache, batch in zip(caches, merged, strict=True):
            row = batch.extract(b)
            assert all(mx.array_equal(*pair).item() for pair in zip(kv(cache.record), kv(row.record), strict=True))


def test_a_rollback_takes_tokens_back(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24, rollback=4, **MIXED)
    caches, shorter = make_prompt_cache(model), make_prompt_cache(model)
    logits_of(model, shorter, [40])
    logits_of(model, caches, [40, 1, 1, 1])
    for cache, expected in zip(caches, shorter, strict=True):
        assert cache.trim(3) == 3
        assert all(mx.array_equal(*pair).item() for pair in zip(kv(cache.record), kv(expected.record), strict=True))


def test_taking_back_beyond_a_boundary_brings_the_ranks_back(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=60, interval=8, **MIXED)
    caches, straight = make_prompt_cache(model), make_prompt_cache(model)
    logits_of(model, caches, [8, 8, 8, 4])
    caches[0].trim(13)
    logits_of(model, straight, [8, 7])
    keys, values = (mx.random.normal((1, 2, 1, 32)) for _ in range(2))
    for _ in range(70):
        for cache in (caches[0], straight[0]):
            cache.update_and_fetch(keys, values)
    assert np.array_equal(*stored_rows([caches[0], straight[0]]))


def test_speculative_decoding_gives_the_tokens_of_plain_decoding(tiny_model: Callable[..., nn.Module]) -> None:
    model, draft = tiny_model(**WIDE), tiny_model(seed=1, **WIDE)
    vc.install(model, "l2norm", budget=80, rollback=8, bits=8, group_size=32)
    prompt, caches = mx.array(PROMPT), [*make_prompt_cache(model), *make_prompt_cache(draft)]
    drafted = [
        int(token)
        for token, *_ in speculative_generate_step(
            prompt, model, draft, num_draft_tokens=3, max_tokens=15, prompt_cache=caches
        )
    ]
    assert drafted == [int(token) for token, _ in generate_step(prompt, model, max_tokens=15)]


def test_bytes_are_those_of_the_arrays(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24, **MIXED)
    caches = make_prompt_cache(model)
    logits_of(model, caches, [40, 1])
    row = (32 + 32 // 32 * 8) + (16 + 32 // 32 * 8)  # 8-bit and 4-bit numbers, float32 scales and biases
    assert caches[0].kept_bytes == 2 * 24 * row
    assert caches[0].full_seq_bytes == 2 * 41 * 2 * 32 * 4


def test_the_report_counts_rows_as_they_are_stored(model: nn.Module) -> None:
    report = vc.install(model, "l2norm", budget=24, **MIXED)
    assert report.footprint is not None
    assert report.footprint.token_bytes == 2 * 2 * 64 * 4
    assert report.footprint.most_bytes == 2 * 2 * 24 * (32 + 8 + 16 + 8)


def test_sliding_windows_stay_as_the_model_made_them(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gemma3_text", **WIDE)
    report = vc.install(model, "l2norm", budget=24, bits=4, group_size=32)
    caches = make_prompt_cache(model)
    assert {type(cache) for cache in caches} == {vc.EvictingKVCache, RotatingKVCache}
    assert "a sliding window bounds itself" in str(report)


def test_a_cache_as_rows_came_has_no_bits(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=24)
    caches = make_prompt_cache(model)
    logits_of(model, caches, [40, 1])
    assert not hasattr(caches[0], "bits")
    assert not hasattr(caches[0], "group_size")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 7}, "key_bits must be one of None, 2, 3, 4, 5, 6, 8, got 7"),
        ({"bits": 4}, "keys of dimension 32 cannot be quantised in groups of 64"),
        ({"bits": 4, "group_size": 16}, "group_size must be one of 32, 64, 128"),
        ({"bits": 4, "key_bits": 8, "group_size": 32}, "is key_bits and value_bits in one"),
        ({"method": "streaming_llm", "bits": 4, "group_size": 32, "renumber": True}, "renumber=True turns"),
        ({"method": "qfilters", "bits": 4, "group_size": 32}, "without filters"),
    ],
)
def test_what_cannot_work_is_refused_at_install(model: nn.Module, arguments: dict[str, Any], message: str) -> None:
    own = type(make_prompt_cache(model)[0])
    with pytest.raises(ValueError, match=message):
        vc.install(model, **{"method": "l2norm", "budget": 24} | arguments)
    assert type(make_prompt_cache(model)[0]) is own


def test_attention_by_hand_is_refused_with_the_reason(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(
        "gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=32.0, **WIDE
    )
    with pytest.raises(ValueError, match=r"'gemma2' does attention by hand.*cannot read quantised rows"):
        vc.install(model, "l2norm", budget=24, bits=4, group_size=32)


def test_a_model_that_casts_what_its_caches_return_is_refused(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("stablelm", hidden_size=128)
    with pytest.raises(ValueError, match="'stablelm' does something with the keys and values"):
        vc.install(model, "l2norm", budget=24, bits=4, group_size=32)


def test_a_model_that_does_not_run_here_is_not_refused_for_its_rows(model: nn.Module) -> None:
    class Broken(nn.Module):
        def __call__(self, hidden: mx.array) -> mx.array:
            raise RuntimeError("no such kernel on this machine")

    model.model.layers[0].mlp = Broken()
    with pytest.raises(RuntimeError, match="no such kernel"):
        vc.install(model, "l2norm", budget=24, bits=4, group_size=32)
    assert type(make_prompt_cache(model)[0]) is not vc.EvictingKVCache

"""A dtype that changes in mid-text, as after an image's float32 embeddings: rows have the first one, as in KVCache."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from calibrated import needed_calibration, random_calibration
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

import velox_cache as vc
from velox_cache.installation.layer_arguments import calibration_for
from velox_fn import METHODS, kv
from velox_fn.registry import method_named

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(30)]


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    made = tiny_model()
    made.set_dtype(mx.bfloat16)
    return made


def prefilled(model: nn.Module, caches: Sequence[Any], dtype: mx.Dtype, prompt: Sequence[int] = PROMPT) -> mx.array:
    embeddings = model.model.embed_tokens(mx.array([prompt])).astype(dtype)
    return model(mx.array([prompt]), cache=caches, input_embeddings=embeddings)[:, -1]


def decoded(model: nn.Module, caches: Sequence[Any], logits: mx.array, n_tokens: int = 20) -> list[list[int]]:
    tokens = []
    for _ in range(n_tokens):
        tokens.append(mx.argmax(logits, axis=-1))
        logits = model(tokens[-1][:, None], cache=caches)[:, -1]
    return mx.stack(tokens, axis=1).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_tokens_after_float32_embeddings_are_the_plain_caches(model: nn.Module, method: str) -> None:
    plain = make_prompt_cache(model)
    expected = decoded(model, plain, prefilled(model, plain, mx.float32))
    vc.install(model, method, budget=64, calibration=needed_calibration(method))
    caches = make_prompt_cache(model)
    assert decoded(model, caches, prefilled(model, caches, mx.float32)) == expected
    assert [rows.dtype for rows in kv(caches[0].record)] == [plain[0].keys.dtype, plain[0].values.dtype]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", [mx.float32, mx.bfloat16], ids=str)
def test_rows_keep_the_first_dtype_over_budget(model: nn.Module, method: str, first: mx.Dtype) -> None:
    vc.install(model, method, budget=40, calibration=calibration_for(method_named(method), random_calibration()))
    caches = make_prompt_cache(model)
    prefilled(model, caches, first)
    for then in (mx.bfloat16, mx.float32):
        decoded(model, caches, prefilled(model, caches, then), 3)
    assert [rows.dtype for rows in kv(caches[0].record)] == [first, first]
    assert caches[0].size() == 40


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtypes", [(mx.float32, mx.bfloat16), (mx.bfloat16, mx.float32)], ids=str)
def test_a_batch_has_the_dtype_of_its_first_row_as_the_plain_one(
    model: nn.Module, method: str, dtypes: tuple[mx.Dtype, mx.Dtype]
) -> None:
    def run(merge: Callable[[Sequence[Any]], Any]) -> tuple[list[list[int]], Any]:
        alone = [make_prompt_cache(model) for _ in dtypes]
        prompts = (PROMPT, PROMPT[:17])
        logits = [prefilled(model, *each) for each in zip(alone, dtypes, prompts, strict=True)]
        caches = [merge(layer) for layer in zip(*alone, strict=True)]
        return decoded(model, caches, mx.concatenate([row.astype(mx.float32) for row in logits])), caches[0]

    expected, plain = run(KVCache.merge)
    assert isinstance(plain, BatchKVCache)
    vc.install(model, method, budget=64, calibration=needed_calibration(method))
    found, batch = run(vc.EvictingKVCache.merge)
    assert found == expected
    assert [rows.dtype for rows in kv(batch.record)] == [plain.keys.dtype, plain.values.dtype]

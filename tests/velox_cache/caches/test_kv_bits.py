"""mlx_lm's kv_bits with evicting caches: left alone, with one clear warning."""

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

import velox_cache as vc

PROMPT = mx.array([(11 * i) % 97 for i in range(60)])

HERE = str(Path(__file__).parents[1])


def tokens_of(model: nn.Module, **options: object) -> list[int]:
    return [int(token) for token, _ in generate_step(PROMPT, model, max_tokens=20, **options)]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:kv_bits")
def test_generated_text_is_that_without_kv_bits(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=24)
    assert tokens_of(model, kv_bits=8, quantized_kv_start=0) == tokens_of(model)


@pytest.mark.filterwarnings("ignore:kv_bits")
def test_caches_stay_evicting_and_bounded(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=24)
    caches = make_prompt_cache(model)
    tokens_of(model, prompt_cache=caches, kv_bits=4, quantized_kv_start=0)
    assert all(type(cache) is vc.EvictingKVCache and cache.size() == 24 for cache in caches)


@pytest.mark.filterwarnings("ignore:kv_bits")
def test_plain_caches_beside_evicting_ones_are_still_quantised(tiny_model: Callable[..., nn.Module]) -> None:
    model, plain = tiny_model(head_dim=32), tiny_model(head_dim=32)
    vc.install(model, "l2norm", budget=24)
    caches = [make_prompt_cache(model)[0], make_prompt_cache(plain)[1]]
    tokens_of(model, prompt_cache=caches, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert [type(cache) for cache in caches] == [vc.EvictingKVCache, QuantizedKVCache]


def test_kv_bits_warns_and_says_what_to_do(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=24)
    with pytest.warns(UserWarning, match="kv_bits has no effect.*budget"):
        tokens_of(model, kv_bits=8, quantized_kv_start=0)


def test_one_warning_for_all_layers_and_steps(tmp_path: Path) -> None:
    program = f"""
        import importlib, sys
        sys.path.insert(0, {HERE!r})
        import mlx.core as mx
        from conftest import SIZES
        from mlx_lm.generate import generate_step
        import velox_cache as vc
        arch = importlib.import_module("mlx_lm.models.llama")
        model = arch.Model(arch.ModelArgs.from_dict({{"model_type": "llama"}} | SIZES))
        vc.install(model, "l2norm", budget=24)
        list(generate_step(mx.arange(60), model, max_tokens=20, kv_bits=8, quantized_kv_start=0))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120, capture_output=True, text=True
    )
    assert ran.stderr.count("kv_bits has no effect") == 1


def test_no_warning_without_kv_bits(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens_of(model)

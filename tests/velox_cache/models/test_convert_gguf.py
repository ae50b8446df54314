"""The converter: published weights come back, text survives, the real models speak."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate, load
from rich.progress import Progress
from tiny_gguf import QUANT, write_gemma3, write_llama

from velox_cache.models.convert import convert_gguf
from velox_cache.models.sources import Precision

_SILENT = Progress(disable=True)


def _converted(path: Path, precision: Precision = "float32") -> tuple[dict[str, mx.array], dict[str, Any], Path]:
    folder = path.parent / f"folder-{precision}"
    convert_gguf(path, folder, precision, _SILENT)
    return mx.load(str(folder / "model.safetensors")), json.loads((folder / "config.json").read_text()), folder


@pytest.mark.parametrize("write", [write_llama, write_gemma3])
def test_float32_weights_are_the_published_ones(tmp_path: Path, write: Any) -> None:
    published = write(tmp_path / "tiny.gguf")
    weights, _, _ = _converted(tmp_path / "tiny.gguf")
    assert weights.keys() == {f"{name}.weight" for name in published}
    for name, weight in published.items():
        # Gemma's norms travel as weight + 1 in float32, which costs an ulp of 1.
        np.testing.assert_allclose(np.array(weights[f"{name}.weight"]), weight, rtol=0, atol=1.2e-7, err_msg=name)


@pytest.mark.parametrize("quant", [QUANT.Q4_0, QUANT.Q4_1, QUANT.Q5_0, QUANT.Q5_1, QUANT.Q8_0])
def test_4bit_keeps_the_files_own_quantisation(tmp_path: Path, quant: QUANT) -> None:
    published = write_llama(tmp_path / "tiny.gguf", quant)
    weights, config, _ = _converted(tmp_path / "tiny.gguf", "4bit")
    for name in ("model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
        bits = config["quantization"].get(name, config["quantization"])["bits"]
        packed, scales, biases = (weights[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        values = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits)
        np.testing.assert_allclose(np.array(values), published[name], rtol=0, atol=1e-7, err_msg=name)


def test_4bit_folder_generates(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", QUANT.Q4_1)
    _, _, folder = _converted(tmp_path / "tiny.gguf", "4bit")
    model, tokenizer = load(str(folder))
    assert isinstance(generate(model, tokenizer, "hello", max_tokens=2), str)


def test_byte_level_vocabulary_merges_and_marks_special_tokens(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    _, tokenizer = load(str(_converted(tmp_path / "tiny.gguf")[2]))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<|im_start|>hello12")) == [
        *("<|im_start|>", "hel", "l", "o", "1", "2"),
    ]


def test_sentencepiece_vocabulary_starts_with_bos_and_merges_by_score(tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf")
    _, tokenizer = load(str(_converted(tmp_path / "tiny.gguf")[2]))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abcbc\n\n b!")) == [
        *("<bos>", "ab", "c", "bc", "\n\n", "\u2581", "b", "<0x21>"),
    ]


def test_generation_ends_at_the_end_of_a_turn(tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf")
    assert load(str(_converted(tmp_path / "tiny.gguf")[2]))[1].eos_token_ids == {1, 5}


def test_unknown_tensor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr("velox_cache.models.architectures._TOP_NAMES", {})
    with pytest.raises(ValueError, match=r"token_embd\.weight"):
        _converted(tmp_path / "tiny.gguf")


@pytest.mark.real_model
def test_smollm2_knows_the_capital_of_france(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=12)


@pytest.mark.real_model
def test_smollm2_special_tokens_are_single(smollm2: tuple[Any, Any]) -> None:
    assert smollm2[1].encode("<|im_start|>hi<|im_end|>") == [1, 6004, 2]


@pytest.mark.real_model
def test_gemma3_writes_sense_past_its_sliding_window(gemma3_path: Path) -> None:
    model, tokenizer = load(str(gemma3_path))
    assert tokenizer.encode("<start_of_turn>", add_special_tokens=False) == [105]
    prompt = "The capital of Spain is Madrid. " * 72 + "The capital of Italy is Rome. The capital of France is"
    assert len(tokenizer.encode(prompt)) > 512
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=1)

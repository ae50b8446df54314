"""A GGUF file to an ordinary mlx_lm model folder."""

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
from mlx_lm import load
from rich.progress import Progress

from velox_cache.models.architectures import Architecture, Metadata, architecture_of
from velox_cache.models.sources import Precision
from velox_cache.models.tokenizer import eos_token_ids, tokenizer_config, tokenizer_json
from velox_cache.models.weights import GROUP_SIZE, float_weight, half_split_rows, packed_weight

_ROUND_TRIP = "Velox — 12 caches,\n\tkept in  order: naïve 日本 🦀."


def convert_gguf(path: Path, folder: Path, precision: Precision, progress: Progress) -> None:
    """Write the model of the GGUF at `path` into the new folder `folder`, and check that mlx_lm loads it.

    "4bit" keeps the file's quantisation where mlx has the same form (see `packed_weight`); the embedding and some
    layers then have more bits than 4. Norms and scales are float16.

    Raises:
        ValueError: the architecture or the vocabulary is not known.
        RuntimeError: what was written does not load in mlx_lm, or does not give text back.
    """
    reading = progress.add_task("Reading GGUF", total=None)
    reader = gguf.GGUFReader(path)
    metadata: Metadata = {key: field.contents() for key, field in reader.fields.items()}
    progress.update(reading, total=1, completed=1)

    architecture = architecture_of(metadata)
    config = architecture.config(metadata)
    weights: dict[str, mx.array] = {}
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4}
    for tensor in progress.track(reader.tensors, description="Converting weights"):
        _convert_tensor(tensor, architecture, config, precision, weights, quantization)

    eos = eos_token_ids(metadata)
    config |= {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "float32" if precision == "float32" else "float16",
    }
    if precision == "4bit":
        config["quantization"] = quantization

    writing = progress.add_task("Writing and checking", total=None)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    _write_json(folder / "tokenizer.json", tokenizer_json(metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, config["max_position_embeddings"]))
    _check(folder)
    progress.update(writing, total=1, completed=1)


def _convert_tensor(
    tensor: gguf.ReaderTensor,
    architecture: Architecture,
    config: dict[str, Any],
    precision: Precision,
    weights: dict[str, mx.array],
    quantization: dict[str, Any],
) -> None:
    name = architecture.mlx_name(tensor.name)
    part = tensor.name.removesuffix(".weight").split(".")[-1]
    heads = architecture.interleaved.get(part)
    rows = half_split_rows(config[heads], len(tensor.data)) if heads else None
    if precision == "4bit" and (packed := packed_weight(tensor, rows)) is not None:
        arrays, bits = packed
        weights.update({f"{name}.{key}": array for key, array in arrays.items()})
        if bits != quantization["bits"]:
            quantization[name] = {"group_size": GROUP_SIZE, "bits": bits}
        return
    values = float_weight(tensor, rows)
    if part.endswith("norm"):
        values = values - architecture.norm_shift
    weights[f"{name}.weight"] = mx.array(values).astype(mx.float32 if precision == "float32" else mx.float16)


def _check(folder: Path) -> None:
    """Load the folder as mlx_lm does: names and shapes must fit the configuration, text must survive the tokenizer."""
    try:
        _, tokenizer = load(str(folder), lazy=True)
    except Exception as error:
        raise RuntimeError(f"mlx_lm cannot load the converted model: {error}") from error
    back = tokenizer.decode(tokenizer.encode(_ROUND_TRIP, add_special_tokens=False))
    if back != _ROUND_TRIP:
        raise RuntimeError(f"the converted tokenizer turns {_ROUND_TRIP!r} into {back!r}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=None if len(content) > 50 else 1), encoding="utf-8")

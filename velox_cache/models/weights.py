"""GGUF tensors as mlx arrays: dequantised, or packed for mlx's quantised layers in groups of 32."""

from typing import Any

import gguf
import gguf.quants
import mlx.core as mx
import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32

# Block formats of 32 values `scale * code + minimum` with float16 scale first: they go into mlx's layout unchanged.
# Name to (bits, zero point); None where the block stores its own minimum.
_KEPT: dict[str, tuple[int, int | None]] = {
    "Q4_0": (4, 8),
    "Q4_1": (4, None),
    "Q5_0": (5, 16),
    "Q5_1": (5, None),
    "Q8_0": (8, 128),
}
# Formats that mlx cannot hold are rounded again, two bits wider: at its own width Gemma 3 270M loses a tenth of its
# perplexity.
_ROUNDED = {"Q4_K": 6, "Q5_K": 8, "Q6_K": 8}


def float_weight(tensor: gguf.ReaderTensor, rows: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.float32]:
    """The tensor's values, float32, in GGUF's `data` order `[out, in]`; `rows` picks and orders the rows."""
    stored = tensor.data if rows is None else tensor.data[rows]
    return gguf.quants.dequantize(stored, tensor.tensor_type)


def packed_weight(
    tensor: gguf.ReaderTensor, rows: npt.NDArray[np.intp] | None = None
) -> tuple[dict[str, mx.array], int] | None:
    """A quantised matrix in mlx's affine form, and its bits; None for a tensor that is not quantised.

    `weight` uint32 `[out, in * bits / 32]`, `scales` and `biases` float16 `[out, in / 32]`. Q4_0, Q4_1, Q5_0, Q5_1 and
    Q8_0 keep their very codes and scales; Q4_K, Q5_K and Q6_K are quantised anew with `mx.quantize`.
    """
    kind = tensor.tensor_type.name
    values = float_weight(tensor, rows)
    if kind in _KEPT:
        stored = tensor.data if rows is None else tensor.data[rows]
        return _kept(values, stored, *_KEPT[kind]), _KEPT[kind][0]
    if kind in _ROUNDED:
        packed = mx.quantize(mx.array(values).astype(mx.float16), group_size=GROUP_SIZE, bits=_ROUNDED[kind])
        return dict(zip(("weight", "scales", "biases"), packed, strict=True)), _ROUNDED[kind]
    return None


def half_split_rows(n_heads: int, n_rows: int) -> npt.NDArray[np.intp]:
    """The row order that undoes llama.cpp's interleaving of each head's two halves `[n_rows]`.

    llama.cpp stores row 2i + j of a head for row j * D/2 + i of the published weights, to rotate neighbouring pairs.
    """
    return np.arange(n_rows).reshape(n_heads, n_rows // n_heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _kept(
    values: npt.NDArray[np.float32], stored: npt.NDArray[Any], bits: int, zero: int | None
) -> dict[str, mx.array]:
    n_rows, n_columns = values.shape
    n_groups = n_columns // GROUP_SIZE
    blocks = stored.reshape(n_rows, n_groups, -1)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)
    minimum = -scale * np.float16(zero) if zero is not None else np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)
    step = np.where(scale == 0, 1, scale).astype(np.float32)
    # The values are scale * code + minimum to within rounding, so the codes come back whatever their bit layout.
    codes = np.rint((values.reshape(n_rows, n_groups, GROUP_SIZE) - minimum.astype(np.float32)) / step).astype(np.uint8)
    low_bits = np.unpackbits(codes.reshape(n_rows, n_columns, 1), axis=2, bitorder="little")[..., :bits]
    words = np.packbits(low_bits.reshape(n_rows, -1), axis=1, bitorder="little").view(np.uint32)
    return {"weight": mx.array(words), "scales": mx.array(scale[..., 0]), "biases": mx.array(minimum[..., 0])}

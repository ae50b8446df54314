"""Rows as entries of codebooks, the storage of VecInfer: see `vector_quantised`.

The nearest entry is found in whole numbers, steps of 1/128: sums of those are exact in float32 in any order, so that a
row has the same codes alone and in a block.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from velox_fn.engine.constants import Constants
from velox_fn.engine.half import Half, one_array

BITS = (1, 2, 4)
N_ENTRIES = 256
ENTRIES = ("key_codebook", "value_codebook")
ARRAYS = ("key_smoothing", *ENTRIES)
_AT_ONCE = 2**24  # products with entries held at a time
_STEPS, _MOST = 128, 1023  # of a whole number: 8 squares of the largest stay below 2**23


@dataclass(frozen=True)
class Codebooks:
    """The `Storage` of such rows: each half is codes uint8 [B,H,n,D/d], and sizes [B,H,n,1] of the rows' dtype."""

    bits: int  # of a number: 8/d
    books: Constants  # smoothing [H,D], keys' entries [H,256,d], values' entries [H,256,d]: float32, float16, float16

    packed = True
    one_width = None
    n_arrays = (2, 2)

    @property
    def nbytes(self) -> int:
        """Bytes of smoothing and entries."""
        return sum(array.nbytes for array in self.books.values)

    def dims(self, keys: Half, values: Half) -> tuple[int, int]:
        """D and D_v."""
        d = 8 // self.bits
        return one_array(keys).shape[3] * d, one_array(values).shape[3] * d

    def stored(self, keys: Half, values: Half) -> tuple[Half, Half]:
        """Arriving rows as they are kept. Rows that are coded already stay as they are."""
        smoothing, key_entries, value_entries = self.books.values
        if not isinstance(keys, tuple):
            keys = coded(_turned(keys.astype(mx.float32) / smoothing[:, None]), key_entries, keys.dtype)
        return keys, values if isinstance(values, tuple) else coded(values, value_entries, values.dtype)

    def read(self, keys: Half, values: Half) -> tuple[mx.array, mx.array]:
        """Rows as arrays [B,H,n,D] and [B,H,n,D_v] of the dtype that they came in."""
        smoothing, key_entries, value_entries = self.books.values
        if isinstance(keys, tuple):
            codes, sizes = keys
            turned = decoded((codes, sizes.astype(mx.float32)), key_entries)
            keys = (_turned(turned) * smoothing[:, None]).astype(sizes.dtype)
        return keys, decoded(values, value_entries) if isinstance(values, tuple) else values

    def empty(self, keys: mx.array, values: mx.array) -> tuple[Half, Half]:
        """No rows, stored so. ValueError where the codebooks are of other heads, or their parts do not fit."""
        smoothing, d = self.books.values[0], 8 // self.bits
        if smoothing.shape != (keys.shape[1], keys.shape[3]) or values.shape[3] % d:
            raise ValueError(
                f"the codebooks are of {smoothing.shape[0]} heads with keys of width {smoothing.shape[1]}, in parts of "
                f"{d} numbers; keys of {keys.shape[1]} heads and width {keys.shape[3]}, with values of width "
                f"{values.shape[3]}, cannot be coded by them; calibrate this model"
            )

        def none(half: mx.array) -> Half:
            *leading, width = half.shape
            return mx.zeros((*leading, width // d), mx.uint8), mx.zeros((*leading, 1), half.dtype)

        return none(keys), none(values)

    def logits(self, queries: mx.array, keys: Half) -> mx.array:
        """[B,H,L,n] of queries [B,H,L,D]: a sum of products with entries, looked up."""
        smoothing, entries, _ = self.books.values
        codes, sizes = keys
        batch, n_heads, n_rows, n_parts = codes.shape
        turned = _turned(queries.astype(mx.float32) * smoothing[:, None])
        tables = turned.reshape(batch, n_heads, -1, entries.shape[2]) @ entries.astype(mx.float32).swapaxes(-1, -2)
        tables = tables.reshape(batch, n_heads, -1, n_parts * N_ENTRIES)
        places = codes.astype(mx.uint32) + N_ENTRIES * mx.arange(n_parts, dtype=mx.uint32)
        places = mx.broadcast_to(places.reshape(batch, n_heads, 1, -1), (*tables.shape[:3], n_rows * n_parts))
        found = mx.take_along_axis(tables, places, axis=3).reshape(*tables.shape[:3], n_rows, n_parts).sum(-1)
        logits: mx.array = (found * sizes.swapaxes(-1, -2).astype(mx.float32)).astype(queries.dtype)
        return logits

    def weighted(self, weights: mx.array, values: Half) -> mx.array:
        """The sums [B,H,L,D_v] of rows by weights [B,H,L,n]; the values are read back for it."""
        return weights @ decoded(values, self.books.values[2])


def coded(rows: mx.array, entries: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Codes uint8 [B,H,n,W/d] of rows [B,H,n,W] by entries [H,256,d], and sizes [B,H,n,1] in `dtype`."""
    batch, n_heads, n_rows, width = rows.shape
    wide, d = rows.astype(mx.float32), entries.shape[2]
    sizes = mx.sqrt(mx.square(wide).mean(-1, keepdims=True)).astype(dtype)
    parts = whole(wide / mx.maximum(sizes.astype(mx.float32), 1e-30)).reshape(batch, n_heads, n_rows * width // d, d)
    known = whole(entries.astype(mx.float32))
    halves = mx.square(known).sum(-1)[:, None] / 2
    at_once = max(1, _AT_ONCE // (batch * n_heads * N_ENTRIES))
    codes = [
        mx.argmax(parts[:, :, start : start + at_once] @ known.swapaxes(-1, -2) - halves, axis=-1)
        for start in range(0, parts.shape[2], at_once)
    ]
    return mx.concatenate(codes, axis=2).astype(mx.uint8).reshape(batch, n_heads, n_rows, width // d), sizes


def decoded(half: tuple[Any, ...], entries: mx.array) -> mx.array:
    """The rows [B,H,n,W] of codes and sizes, in the sizes' dtype."""
    codes, sizes = half
    found = entries.astype(sizes.dtype)[mx.arange(codes.shape[1])[:, None, None], codes]
    rows: mx.array = found.reshape(*codes.shape[:3], codes.shape[3] * entries.shape[2]) * sizes
    return rows


def whole(numbers: mx.array) -> mx.array:
    """Numbers of unit size as whole numbers of steps, float32."""
    return mx.clip(mx.round(numbers * _STEPS), -_MOST, _MOST)


def _turned(rows: mx.array) -> mx.array:
    """Rows times the orthonormal Walsh-Hadamard matrix, which is its own inverse."""
    return mx.hadamard_transform(rows) if rows.size else rows  # which mlx refuses

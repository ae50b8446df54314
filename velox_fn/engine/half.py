"""The keys or the values of some rows: one array, or those that a storage makes of it.

A row is whatever arrays belong to it. All of them have its batch, head and place as their first axes, so what moves
rows moves each array alike. The second is of the dtype that the rows came in, and not finite where a row was not. A row
with zeros in all of them reads as zeros. Rows are quantised once, when they arrive. Afterwards their bits are moved and
read.

`Widths` is the storage of rows as they came, and of those that mx.quantize makes: packed uint32 [B,H,n,D*bits/32], and
scales and biases [B,H,n,D/group_size]. `codebooks` has another; `storage` says what any must do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.records import arrays, refilled

Half = Any
"""mx.array [B,H,n,D], or a tuple of arrays, such as (packed, scales, biases)."""

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
_WORD = 32  # bits of a packed number
_PARTS = 3  # arrays of a quantised half


@dataclass(frozen=True)
class Widths:
    """Rows as `mx.quantize` makes them. None: as they came."""

    key_bits: int | None = None
    value_bits: int | None = None
    group_size: int = 64

    @property
    def packed(self) -> bool:
        """Whether any of a row is quantised."""
        return self.key_bits is not None or self.value_bits is not None

    @property
    def one_width(self) -> tuple[int, int] | None:
        """(bits, group_size) where keys and values have one width."""
        if self.key_bits is None or self.key_bits != self.value_bits:
            return None
        return self.key_bits, self.group_size

    @property
    def nbytes(self) -> int:
        """Rows share nothing."""
        return 0

    @property
    def n_arrays(self) -> tuple[int, int]:
        """How many arrays keys and values are."""
        return 1 if self.key_bits is None else _PARTS, 1 if self.value_bits is None else _PARTS

    def dims(self, keys: Half, values: Half) -> tuple[int, int]:
        """D and D_v."""
        return _width(keys, self.key_bits), _width(values, self.value_bits)

    def stored(self, keys: Half, values: Half) -> tuple[Half, Half]:
        """Arriving rows as they are kept. Rows that are quantised already stay as they are."""
        return _stored(keys, self.key_bits, self.group_size), _stored(values, self.value_bits, self.group_size)

    def read(self, keys: Half, values: Half) -> tuple[mx.array, mx.array]:
        """Rows as arrays [B,H,n,D] and [B,H,n,D_v] of the dtype that they came in."""
        return _read(keys, self.key_bits, self.group_size), _read(values, self.value_bits, self.group_size)

    def empty(self, keys: mx.array, values: mx.array) -> tuple[Half, Half]:
        """No rows, of these widths. ValueError where they cannot be quantised so."""
        for name, half, bits in (("keys", keys, self.key_bits), ("values", values, self.value_bits)):
            if bits is not None and half.shape[3] % self.group_size:
                raise ValueError(
                    f"{name} of dimension {half.shape[3]} cannot be quantised in groups of {self.group_size}, which do "
                    f"not divide it; group_size is one of {', '.join(map(str, GROUP_SIZES))}"
                )
        return self._empty(keys, self.key_bits), self._empty(values, self.value_bits)

    def logits(self, queries: mx.array, keys: Half) -> mx.array:
        """[B,H,L,n] of queries [B,H,L,D]."""
        return _product(queries, keys, self.key_bits, self.group_size, transpose=True)

    def weighted(self, weights: mx.array, values: Half) -> mx.array:
        """The sums [B,H,L,D_v] of rows by weights [B,H,L,n]."""
        return _product(weights, values, self.value_bits, self.group_size, transpose=False)

    def _empty(self, half: mx.array, bits: int | None) -> Half:
        if bits is None:
            return half
        *leading, width = half.shape
        groups = mx.zeros((*leading, width // self.group_size), half.dtype)
        return mx.zeros((*leading, width * bits // _WORD), mx.uint32), groups, groups


AS_THEY_CAME = Widths()


def widths_of(key_bits: object, value_bits: object, group_size: object) -> Widths:
    """The widths, checked. ValueError for bits or groups that MLX does not have."""
    for name, bits in (("key_bits", key_bits), ("value_bits", value_bits)):
        checks.one_of(name, checks.plain(bits), (None, *BITS))
    checks.one_of("group_size", checks.plain(group_size), GROUP_SIZES)
    return Widths(checks.plain(key_bits), checks.plain(value_bits), checks.plain(group_size))


def each(move: Callable[..., mx.array], *halves: Half) -> Half:
    """`move` of an array of rows, or of each of the arrays that rows are made of."""
    if isinstance(halves[0], tuple):
        return tuple(move(*parts) for parts in zip(*halves, strict=True))
    return move(*halves)


def cut(half: Half, start: int | None, stop: int | None) -> Half:
    """The rows from `start` to `stop`."""
    return half[:, :, start:stop] if isinstance(half, mx.array) else tuple(rows[:, :, start:stop] for rows in half)


def zeroed(half: Half, where: mx.array) -> Half:
    """`half` with zeros in the rows that bool [B,H,n] names, or all heads' with [B,1,n]."""
    return each(lambda rows: mx.where(where[..., None], mx.zeros((), rows.dtype), rows), half)


def one_array(half: Half) -> mx.array:
    """An array that has the rows' batch, heads and number."""
    array: mx.array = half[0] if isinstance(half, tuple) else half
    return array


def floats(*halves: Half) -> tuple[mx.array, ...]:
    """Arrays of numbers [B,H,n,...] in which a row that was not finite is not finite."""
    return tuple(array for array in arrays(halves) if array.dtype in checks.FLOATS)


def float_dtype(half: Half) -> mx.Dtype:
    """The dtype that the rows came in."""
    dtype: mx.Dtype = (half[1] if isinstance(half, tuple) else half).dtype  # of the three, that of the scales
    return dtype


def as_dtype(half: Half, dtype: mx.Dtype) -> Half:
    """The same rows with their numbers in `dtype`."""
    return each(lambda rows: rows.astype(dtype) if rows.dtype in checks.FLOATS else rows, half)


def depending(parts: Any, on: Sequence[mx.array]) -> Any:
    """A view, or a half, that is computed when those arrays are."""
    leaves = mx.depends(arrays(parts), list(on))
    return leaves[0] if isinstance(parts, mx.array) else refilled(parts, leaves)


def _width(half: Half, bits: int | None) -> int:
    columns = int(one_array(half).shape[3])
    return columns if bits is None else columns * _WORD // bits


def _stored(rows: Half, bits: int | None, group_size: int) -> Half:
    if bits is None or isinstance(rows, tuple):
        return rows
    packed, scales, biases = mx.quantize(rows, group_size=group_size, bits=bits)
    # Quantising loses NaN. A row that is not finite must read as one that is not.
    unsound = (rows * 0).sum(-1, keepdims=True)
    return packed, scales, biases + unsound


def _read(half: Half, bits: int | None, group_size: int) -> mx.array:
    if not isinstance(half, tuple):
        array: mx.array = half
        return array
    packed, scales, biases = half
    if packed.size == 0:  # which mlx refuses
        return mx.zeros((*packed.shape[:3], _width(half, bits)), scales.dtype)
    return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)


def _product(left: mx.array, half: Half, bits: int | None, group_size: int, *, transpose: bool) -> mx.array:
    if isinstance(half, tuple):
        packed, scales, biases = half
        return mx.quantized_matmul(left, packed, scales, biases, transpose=transpose, group_size=group_size, bits=bits)
    rows: mx.array = half.swapaxes(-1, -2) if transpose else half
    return left @ rows

"""The Metal kernels of this machine against what they must compute. For `velox doctor`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_src import qfilters_score
from velox_fn import fused_evict

_LANES = 32
Sizes = tuple[int, int, int, int, int]
"""B, H, n, D, D_v"""
_SIZES: Sequence[Sizes] = ((1, 1, 1, 1, 1), (2, 3, 150, 33, 80), (1, 8, 2000, 128, 64))
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_UNSIGNED = {2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True)
class Parity:
    """One comparison of a kernel's output with the expected one."""

    kernel: str
    case: str
    differing: int  # elements whose bits differ
    elements: int


def compare_kernels(sizes: Sequence[Sizes] = _SIZES) -> Iterator[Parity]:
    """Runs both kernels on drawn inputs of several shapes and dtypes. Needs Metal (`metal_src.metal_available`)."""
    for size in sizes:
        for dtype in _DTYPES:
            case = f"{'x'.join(map(str, size))} {str(dtype).removeprefix('mlx.core.')}"
            yield _score_parity(case, size, dtype)
            if size[2] > 1:
                yield _evict_parity(case, size, dtype)


def ordered_projection(keys: npt.NDArray[np.float32], filters: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """<filter, key> of keys [..., D] in the score kernel's order: strided partial sums, then a halving tree."""
    padding = -keys.shape[-1] % _LANES
    products = np.pad(keys * filters, [(0, 0)] * (keys.ndim - 1) + [(0, padding)])
    partial = np.zeros((*keys.shape[:-1], _LANES), np.float32)
    for start in range(0, products.shape[-1], _LANES):
        partial += products[..., start : start + _LANES]
    for width in (16, 8, 4, 2, 1):
        partial = partial[..., :width] + partial[..., width : 2 * width]
    return partial[..., 0]


def _rows(sizes: Sizes, dtype: mx.Dtype) -> tuple[np.random.Generator, mx.array, mx.array]:
    B, H, n, D, D_v = sizes
    rng = np.random.default_rng(D)
    keys, values = (mx.array(rng.standard_normal((B, H, n, d)).astype(np.float32)).astype(dtype) for d in (D, D_v))
    return rng, keys, values


def _score_parity(case: str, sizes: Sizes, dtype: mx.Dtype) -> Parity:
    B, H, n, D, _ = sizes
    rng, keys, values = _rows(sizes, dtype)
    filters = rng.standard_normal((B, H, D)).astype(np.float32)
    positions = mx.broadcast_to(mx.arange(n, dtype=mx.int32), (B, H, n))
    offset = mx.full((B,), n, dtype=mx.int32)
    scores = qfilters_score(keys, values, mx.array(filters), positions, offset, n_sink=0, recent=0, sign=1)
    expected = ordered_projection(np.array(keys.astype(mx.float32)), filters[:, :, None]) + np.float32(0.0)
    return _compare("qfilters_score", case, [scores], [mx.array(expected)])


def _evict_parity(case: str, sizes: Sizes, dtype: mx.Dtype) -> Parity:
    B, H, n, _, _ = sizes
    rng, keys, values = _rows(sizes, dtype)
    scores = mx.array(rng.integers(-20, 20, (B, H, n)).astype(np.float32))  # few levels: most scores tie
    positions = mx.broadcast_to(mx.arange(n, dtype=mx.int32), (B, H, n))
    offset = mx.full((B,), n, dtype=mx.int32)
    on_metal, in_mlx = (
        fused_evict(
            keys, values, scores, positions,
            budget=n // 2, n_sink=4, recent=n // 8, offset=offset, use_metal_kernels=use_metal_kernels,
        )
        for use_metal_kernels in (True, False)
    )  # fmt: skip
    return _compare("qfilters_evict_apply", case, list(on_metal), list(in_mlx))


def _compare(kernel: str, case: str, found: list[mx.array], expected: list[mx.array]) -> Parity:
    differing = sum(int(np.count_nonzero(_bits(a) != _bits(b))) for a, b in zip(found, expected, strict=True))
    return Parity(kernel, case, differing, sum(array.size for array in found))


def _bits(array: mx.array) -> npt.NDArray[np.unsignedinteger]:
    return np.array(array.view(_UNSIGNED[array.itemsize]))

"""The emulated cases on real hardware: the same arrays, the same oracles, the same bits."""

import mlx.core as mx
import numpy as np
import pytest

from metal_src import metal_available

from .cases import DTYPES, EvictCase, ScoreCase, Shape
from .emulate import bits

pytestmark = [
    pytest.mark.requires_metal,
    pytest.mark.skipif(not metal_available(), reason="needs an Apple GPU as MLX's default device"),
]

SHAPES = [(1, 1, 1, 1, 1), (1, 2, 100, 64, 64), (2, 3, 150, 33, 80), (2, 2, 600, 128, 64), (1, 8, 2000, 80, 80)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_metal_score_kernel_equals_its_oracle(sizes: tuple[int, int, int, int, int], dtype: mx.Dtype) -> None:
    case = ScoreCase.draw(Shape(*sizes, dtype, threads=256), 4)
    np.testing.assert_array_equal(bits(case.launch(*case.arrays)), case.expected())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_metal_path_matches_pure_mlx_path(sizes: tuple[int, int, int, int, int], dtype: mx.Dtype) -> None:
    shape = Shape(*sizes, dtype, threads=256)
    case = EvictCase.draw(shape, (shape.n + 1) // 2, 4).with_zeroed_padding()
    on_metal = case.launch(*case.arrays, *case.cut())
    for kept, by_mlx, by_oracle in zip(on_metal, case.mlx_path(), case.expected(), strict=True):
        np.testing.assert_array_equal(bits(kept), bits(by_mlx))
        np.testing.assert_array_equal(bits(kept), by_oracle)

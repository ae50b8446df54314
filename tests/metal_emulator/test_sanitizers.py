"""The kernels run clean under the address and undefined-behaviour sanitizers, on small shapes of every kind."""

import numpy as np
import pytest

from .cases import DTYPES, EvictCase, ScoreCase, Shape
from .emulate import bits, emulate_sanitized

pytestmark = [pytest.mark.usefixtures("cxx"), pytest.mark.slow]

SHAPES = [Shape(B, H, n, D, D_v, dtype) for dtype in DTYPES for B, H, n, D, D_v in [(1, 1, 1, 1, 1), (2, 2, 70, 33, 8)]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_score_kernel_runs_clean(shape: Shape) -> None:
    case = ScoreCase.draw(shape, 2)
    np.testing.assert_array_equal(bits(emulate_sanitized(case.captured())[0]), case.expected())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_apply_kernel_runs_clean(shape: Shape) -> None:
    case = EvictCase.draw(shape, (shape.n + 1) // 2, 2)
    for kept, expected in zip(emulate_sanitized(case.captured()), case.expected(), strict=True):
        np.testing.assert_array_equal(bits(kept), expected)

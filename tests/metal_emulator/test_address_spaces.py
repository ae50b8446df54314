"""Both kernels respect address spaces, whichever of their inputs MLX binds as ``constant``."""

import mlx.core as mx
import pytest

from .address_spaces import check_address_spaces
from .cases import DTYPES, EvictCase, ScoreCase, Shape
from .signature import parse
from .small_kernels import kernel

SHAPES = {
    "every input under eight elements": Shape(1, 1, 2, 2, 2),
    "few heads, many rows": Shape(1, 2, 9, 4, 4),
    "every input over eight elements": Shape(9, 1, 9, 9, 9),
}


def spaces(source: str) -> set[str]:
    return {buffer.space for buffer in parse(source).buffers if buffer.const and not buffer.name.endswith("_shape")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_score_kernel_respects_address_spaces(name: str, dtype: mx.Dtype, clang: str) -> None:
    shape = SHAPES[name]
    case = ScoreCase.draw(Shape(shape.B, shape.H, shape.n, shape.D, shape.D_v, dtype), 0)
    assert check_address_spaces(case.captured().source, clang) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_apply_kernel_respects_address_spaces(name: str, dtype: mx.Dtype, clang: str) -> None:
    shape = SHAPES[name]
    case = EvictCase.draw(Shape(shape.B, shape.H, shape.n, shape.D, shape.D_v, dtype), 1, 0)
    assert check_address_spaces(case.captured().source, clang) == ""


def test_the_shapes_cover_both_spaces() -> None:
    smallest, _, largest = SHAPES.values()
    assert spaces(EvictCase.draw(smallest, 1, 0).captured().source) == {"constant"}
    assert "device" in spaces(EvictCase.draw(largest, 1, 0).captured().source)


POINTER = "const device float* pointer = a; out[0] = uint(pointer[0]);"


def test_a_device_pointer_to_a_constant_input_is_caught(clang: str) -> None:
    assert "cannot initialize" in check_address_spaces(kernel(POINTER, mx.zeros((7,))).source, clang)


def test_a_device_pointer_to_a_device_input_passes(clang: str) -> None:
    assert check_address_spaces(kernel(POINTER, mx.zeros((8,))).source, clang) == ""


def test_a_device_pointer_to_threadgroup_memory_is_caught(clang: str) -> None:
    body = "threadgroup uint x[4];\nx[0] = 1;\ndevice uint* pointer = x;\nout[0] = pointer[0];"
    assert "cannot initialize" in check_address_spaces(kernel(body).source, clang)

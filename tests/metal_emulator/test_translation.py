"""Whatever lies outside the documented subset of Metal is refused by name, before anything is compiled."""

import mlx.core as mx
import pytest

from .emulate import emulate
from .signature import UnsupportedMetalError, parse
from .small_kernels import kernel
from .translation import translate


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("out[0] = uint(simd_sum(1.0f));", "simd_sum"),
        ("double x = 0; out[0] = uint(x);", "double"),
        ("out[0] = uint(exp(1.0f));", r"exp\(\.\.\.\)"),
        ("simdgroup_barrier(mem_flags::mem_none);", "simdgroup_barrier"),
        ("#define ONE 1\nout[0] = ONE;", "#define ONE 1"),
        ("threadgroup uint x; out[0] = 0;", "threadgroup memory"),
        ("threadgroup uint x[2][2]; out[0] = 0;", "threadgroup memory"),
        ("threadgroup uint x[2];\nthreadgroup uint* y = x;", "threadgroup memory"),
        ("auto f = [&]() { return 1u; }; out[0] = 1;", "lambda"),
        ("static uint x = 0; out[0] = x;", "static"),
        ("out[0] = std::abs(1);", "std|abs"),
        ("out[0] = thread_index_in_quadgroup;", "thread_index_in_quadgroup"),
        ("volatile uint x = 0; out[0] = x;", "volatile"),
        ("goto end; end: out[0] = 0;", "goto"),
    ],
)
def test_code_outside_the_subset_is_refused_by_name(body: str, named: str) -> None:
    with pytest.raises(UnsupportedMetalError, match=named):
        translate(kernel(body).source)


def test_words_in_comments_are_not_code() -> None:
    assert "simd_sum" not in translate(kernel("// not simd_sum(x)\n/* nor\ndouble */ out[0] = 0;").source)


def test_a_source_of_another_form_is_refused() -> None:
    with pytest.raises(UnsupportedMetalError, match="not the form"):
        parse("kernel void f() {}")


@pytest.mark.usefixtures("cxx")
def test_arithmetic_on_half_precision_is_refused() -> None:
    body = "out[thread_index_in_threadgroup] = uint(float(a[0] + a[1]));"
    with pytest.raises(ValueError, match=r"operator\+"):
        emulate(kernel(body, mx.zeros((8,), mx.float16)))

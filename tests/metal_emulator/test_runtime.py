"""The runtime does what Metal does, and catches what Metal leaves undefined."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from .compilers import CompileError
from .emulate import KernelFaultError, ScheduleDependenceError, emulate, emulate_sanitized
from .small_kernels import kernel

pytestmark = pytest.mark.usefixtures("cxx")

T = "const uint t = thread_index_in_threadgroup;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def outputs(body: str, *arrays: mx.array, groups: int = 1, out: int = 64) -> list[int]:
    values: list[int] = np.array(emulate(kernel(T + body, *arrays, groups=groups, out=out))[0]).tolist()
    return values


@pytest.mark.parametrize(
    ("expression", "of_lane"),
    [
        ("simd_shuffle(t, 5)", lambda t: t - t % 32 + 5),
        ("simd_shuffle_xor(t, 16)", lambda t: t ^ 16),
        ("uint(simd_any(t == 40))", lambda t: t // 32),
        ("simd_prefix_exclusive_sum(t % 32)", lambda t: sum(range(t % 32))),
        ("max(min(t, 9u), 3u)", lambda t: min(max(t, 3), 9)),
        ("as_type<uint>(1.0f)", lambda t: 0x3F800000),
    ],
)
def test_functions_return_what_metal_returns(expression: str, of_lane: Callable[[int], int]) -> None:
    assert outputs(f"out[t] = {expression};") == [of_lane(t) for t in range(64)]


def test_barriers_hand_threadgroup_memory_over() -> None:
    body = f"threadgroup uint seen[64];\nseen[t] = t;\n{BARRIER}out[t] = seen[63 - t];"
    assert outputs(body) == list(range(63, -1, -1))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_every_half_precision_number_converts_exactly(dtype: mx.Dtype) -> None:
    every = mx.array(np.arange(65536, dtype=np.uint16)).view(dtype)
    body = "const uint i = threadgroup_position_in_grid.x * 64 + thread_index_in_threadgroup;\nout[i] = float(a[i]);"
    (converted,) = emulate(kernel(body, every, groups=1024, out=65536, dtype=mx.float32))
    expected = np.array(every.astype(mx.float32))
    np.testing.assert_array_equal(np.array(converted), expected)
    np.testing.assert_array_equal(np.signbit(np.array(converted)), np.signbit(expected))


FAULTS = {
    "read without barrier": ("threadgroup uint x[64];\nx[t] = t;\nout[t] = x[t ^ 1];", "race .* read|uninitialised"),
    "two writers": (f"threadgroup uint x[1];\nx[0] = t;\n{BARRIER}out[t] = x[0];", "race .* two threads write"),
    "write after read": (
        f"threadgroup uint x[1];\nif (t == 0) x[0] = 1;\n{BARRIER}out[t] = x[0];\nif (t == 9) x[0] = 2;",
        "race .* (another thread read|no barrier between)",
    ),
    "wrong barrier flags": (
        "threadgroup uint x[64];\nx[t] = t;\nthreadgroup_barrier(mem_flags::mem_device);\nout[t] = x[63 - t];",
        "race .* no barrier",
    ),
    "read before any write": ("threadgroup uint x[64];\nout[t] = x[t];", "uninitialised read"),
    "array overrun": (f"threadgroup uint x[64];\nx[t + 1] = t;\n{BARRIER}out[t] = x[t];", "index out of range"),
    "barrier skipped": (f"if (t < 32) {{\n{BARRIER}}}\nout[t] = t;", "without reaching a threadgroup barrier"),
    "barriers mixed": (f"if (t < 32) {{\n{BARRIER}}} else {{\n{BARRIER}}}\nout[t] = t;", "different threadgroup barr"),
    "lane left": ("if (t % 2 == 0) return;\nout[t] = simd_shuffle(t, 0);", "lane is missing"),
    "lanes diverged": (
        "if (t % 2 == 0) {\nout[t] = simd_shuffle(t, 0);\n} else {\nout[t] = simd_shuffle(t, 1);\n}",
        "different simd functions",
    ),
    "no such lane": ("out[t] = simd_shuffle(t, 32);", "outside the simdgroup"),
    "output overrun": ("out[t + 1] = t;", "outside a device buffer"),
    "output unwritten": ("if (t > 0) out[t] = t;", "depend on the schedule, or on what they held"),
    "output race": ("out[0] = t;\nif (t > 0) out[t] = t;", "depend on the schedule"),
    "crash": ("out[ulong(t + 1) << 44] = t;", "exit status -11"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught_by_name(name: str) -> None:
    body, fault = FAULTS[name]
    with pytest.raises(KernelFaultError, match=fault):
        emulate(kernel(T + body))


def test_a_threadgroup_does_not_see_what_the_last_one_left() -> None:
    body = "threadgroup uint x[64];\nif (threadgroup_position_in_grid.x == 0) x[t] = t;\n"
    with pytest.raises(KernelFaultError, match="uninitialised read"):
        outputs(f"{body}{BARRIER}out[threadgroup_position_in_grid.x * 64 + t] = x[t];", groups=2, out=128)


def test_threadgroups_that_write_the_same_element_are_caught() -> None:
    with pytest.raises(ScheduleDependenceError):
        outputs("out[t] = threadgroup_position_in_grid.x;", groups=2)


def test_a_local_variable_read_before_a_write_does_not_compile() -> None:
    with pytest.raises(CompileError, match="uninitialized"):
        outputs("uint x;\nout[t] = x;")


def test_writing_to_an_input_does_not_compile() -> None:
    with pytest.raises(CompileError, match=r"read-only|const"):
        outputs("a[0] = 1; out[t] = 0;", mx.zeros((8,), mx.uint32))


def test_the_sanitizers_see_a_read_past_a_buffer() -> None:
    with pytest.raises(KernelFaultError, match="heap-buffer-overflow"):
        emulate_sanitized(kernel(T + "out[t] = a[t];", mx.zeros((63,), mx.uint32)))


def test_the_sanitizers_see_a_signed_overflow() -> None:
    with pytest.raises(KernelFaultError, match="signed integer overflow"):
        emulate_sanitized(kernel(T + "out[t] = uint(a[0] + int(t));", mx.full((8,), 2**31 - 1, dtype=mx.int32)))

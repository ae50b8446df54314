"""Pins the form of MLX's exported record: when MLX changes it, this fails first and says where to look."""

import mlx.core as mx
import pytest

from .capture import capture
from .signature import parse
from .small_kernels import kernel

BODY = "out[thread_index_in_threadgroup] = a[0] + b[0] + uint(a_shape[0]);"


def test_the_exported_record_has_the_form_that_we_read() -> None:
    compiled = mx.fast.metal_kernel("canary", ["a"], ["out"], "out[0] = T(a[0]);")
    records: list[dict[str, object]] = []

    def launch(a: mx.array) -> list[mx.array]:
        return compiled(  # type: ignore[operator, no-any-return]
            inputs=[a],
            template=[("T", mx.float16), ("N", 3)],
            grid=(64, 2, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(4,)],
            output_dtypes=[mx.float16],
        )

    mx.export_function(records.append, launch, mx.zeros((2, 8)))
    (record,) = [record for record in records if record["type"] == "primitive"]
    name = "custom_kernel_canary__float16_t_3_float_float16_t"
    assert record == {
        "type": "primitive",
        "name": "CustomKernel",
        "inputs": [("A", (2, 8), mx.float32)],
        "outputs": [("B", (4,), mx.float16)],
        "arguments": [
            name,
            "template <typename T, int N>\n"
            f"[[kernel]] void {name}(\n"
            "  const device float* a [[buffer(0)]],\n"
            "  device float16_t* out [[buffer(1)]]) {\n"
            "out[0] = T(a[0]);\n"
            "}\n\n"
            f'template [[host_name("{name}")]] [[kernel]] decltype({name}<float16_t, 3>) {name}<float16_t, 3>;\n',
            64, 2, 1,
            32, 1, 1,
            [(False, False, False)],
            True,
            [],
            False,
            0,
            0,
        ],
    }  # fmt: skip


def test_inputs_under_eight_elements_are_constant_and_larger_ones_device() -> None:
    captured = kernel(BODY, mx.zeros((7,), mx.uint32), mx.zeros((8,), mx.uint32))
    spaces = {buffer.name: buffer.space for buffer in parse(captured.source).buffers}
    assert spaces == {"a": "constant", "a_shape": "constant", "b": "device", "out": "device"}


def test_an_input_without_axes_is_a_reference() -> None:
    captured = kernel("out[thread_index_in_threadgroup] = a;", mx.array(3, mx.uint32))
    assert parse(captured.source).buffers[0].reference


def test_constants_of_the_launch_are_captured_by_value() -> None:
    compiled = mx.fast.metal_kernel("constant", ["a"], ["out"], "out[0] = a;")

    def launch() -> list[mx.array]:
        return compiled(  # type: ignore[operator, no-any-return]
            inputs=[mx.array(5, mx.uint32)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.uint32],
        )

    assert capture(launch).inputs[0].item() == 5


def test_a_launch_of_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0"):
        capture(lambda a: a + 1, mx.zeros((1,)))

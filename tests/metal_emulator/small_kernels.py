"""Kernels of a few lines, to test the emulator itself."""

import mlx.core as mx

from .capture import CapturedKernel, capture


def kernel(
    body: str, *arrays: mx.array, threads: int = 64, groups: int = 1, out: int = 64, dtype: mx.Dtype = mx.uint32
) -> CapturedKernel:
    """A captured kernel with inputs ``a``, ``b``, ... and one output ``out`` of ``out`` elements."""
    names = [chr(ord("a") + i) for i in range(len(arrays))]
    compiled = mx.fast.metal_kernel("small", names, ["out"], body)

    def launch(*inputs: mx.array) -> list[mx.array]:
        return compiled(  # type: ignore[operator, no-any-return]
            inputs=list(inputs),
            grid=(threads * groups, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(out,)],
            output_dtypes=[dtype],
        )

    return capture(launch, *arrays)

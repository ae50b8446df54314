"""Takes the exact kernel that MLX would hand to Metal out of MLX's own exporter.

``mx.export_function`` traces a function without running it, so it needs no Metal. Each custom kernel of the trace is
one ``CustomKernel`` record: the generated source, the grid, the threadgroup size, and the shapes and dtypes of
everything bound to it. That record is the single truth; nothing of the signature is rebuilt here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class CapturedKernel:
    """One launch of a custom kernel: what MLX generated, and the arrays bound to it."""

    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    inputs: tuple[mx.array, ...]
    described: tuple[tuple[bool, bool, bool], ...]  # per input: are its shape, strides, number of axes passed along
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]


def capture(launch: Callable[..., object], *arrays: mx.array) -> CapturedKernel:
    """The one custom kernel that ``launch(*arrays)`` would run.

    ``launch`` must hand its arguments, or constants of its own, to the kernel as they are: an array computed on the way
    has no value in a trace.
    """
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, launch, *arrays)
    kernels = [record for record in records if record["type"] == "primitive" and record["name"] == "CustomKernel"]
    if len(kernels) != 1:
        raise ValueError(f"expected one custom kernel in the trace, found {len(kernels)}")
    (kernel,) = kernels
    values: dict[str, mx.array] = {}
    for record in records:
        if record["type"] == "inputs":
            values |= {name: array for (name, _, _), array in zip(record["inputs"], arrays, strict=True)}
        elif record["type"] == "constants":
            values |= dict(record["constants"])
    _name, source, gx, gy, gz, tx, ty, tz, described, *_rest = kernel["arguments"]
    return CapturedKernel(
        source=source,
        grid=(gx, gy, gz),
        threadgroup=(tx, ty, tz),
        inputs=tuple(values[name] for name, _, _ in kernel["inputs"]),
        described=tuple(described),
        outputs=tuple((tuple(shape), dtype) for _, shape, dtype in kernel["outputs"]),
    )

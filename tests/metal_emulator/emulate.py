"""Runs a captured kernel on the CPU, in a process of its own, under several schedules and poisons."""

import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .capture import CapturedKernel
from .compilers import PLAIN, SANITIZED, build
from .signature import UnsupportedMetalError, parse
from .translation import translate

ASCENDING, DESCENDING, SHUFFLED = 0, 1, 2


@dataclass(frozen=True)
class Run:
    """One pass over the grid: in which order threads and threadgroups run, and what outputs hold beforehand."""

    schedule: int
    seed: int
    poison: int


RUNS = tuple(Run(schedule, 7, poison) for schedule in (ASCENDING, DESCENDING, SHUFFLED) for poison in (0xFF, 0x00))


class KernelFaultError(RuntimeError):
    """The kernel did what it must not do; the message says what, and at which line of the body."""


class ScheduleDependenceError(KernelFaultError):
    """The outputs differ between schedules or between what the outputs held beforehand."""


def emulate(
    kernel: CapturedKernel, *, runs: Sequence[Run] = RUNS, mutate: Callable[[str], str] | None = None
) -> list[mx.array]:
    """The outputs of ``kernel``, the same under all ``runs``, or :class:`KernelFaultError`.

    ``mutate`` rewrites the generated source first; it must change it.
    """
    return _outputs(kernel, build(translate(_source(kernel, mutate)), PLAIN), runs)


def emulate_sanitized(kernel: CapturedKernel, *, mutate: Callable[[str], str] | None = None) -> list[mx.array]:
    """As :func:`emulate`, under the address and undefined-behaviour sanitizers, one schedule. For small shapes."""
    return _outputs(kernel, build(translate(_source(kernel, mutate)), SANITIZED), RUNS[:1])


def bits(array: mx.array) -> npt.NDArray[np.unsignedinteger]:
    """The bytes of ``array`` as unsigned integers of its width, to compare bit for bit."""
    return np.array(array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.itemsize]))


def _source(kernel: CapturedKernel, mutate: Callable[[str], str] | None) -> str:
    if mutate is None:
        return kernel.source
    mutant = mutate(kernel.source)
    assert mutant != kernel.source, "the mutation changes nothing"
    return mutant


def _outputs(kernel: CapturedKernel, program: Path, runs: Sequence[Run]) -> list[mx.array]:
    inputs = _input_buffers(kernel)
    sizes = [int(np.prod(shape)) * dtype.size for shape, dtype in kernel.outputs]
    assert len(inputs) + len(sizes) == len(parse(kernel.source).buffers)
    assert all(size % group == 0 for size, group in zip(kernel.grid, kernel.threadgroup, strict=True))
    request = struct.pack("<9I", *kernel.grid, *kernel.threadgroup, len(inputs), len(sizes), len(runs))
    request += b"".join(struct.pack("<Q", size) for size in [*map(len, inputs), *sizes])
    request += b"".join(inputs)
    request += b"".join(struct.pack("<3I", run.schedule, run.seed, run.poison) for run in runs)
    # The sanitizers must be the first library; one preloaded for Python's sake (a BLAS) is not for these programs.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run([program], input=request, capture_output=True, check=False, timeout=120, env=environment)
    if result.returncode != 0:
        raise KernelFaultError(f"exit status {result.returncode}: {result.stderr.decode(errors='replace')[-4000:]}")
    answers = {result.stdout[i * sum(sizes) : (i + 1) * sum(sizes)] for i in range(len(runs))}
    if len(answers) != 1:
        raise ScheduleDependenceError("the outputs depend on the schedule, or on what they held beforehand")
    return _unpack(kernel, answers.pop(), sizes)


def _input_buffers(kernel: CapturedKernel) -> list[bytes]:
    buffers: list[bytes] = []
    for array, (shape, strides, ndim) in zip(kernel.inputs, kernel.described, strict=True):
        buffers.append(bits(array).tobytes())
        if strides or ndim:
            raise UnsupportedMetalError("strides and ndim: the kernels take row-contiguous arrays with fixed axes")
        if shape and array.ndim:
            buffers.append(np.array(array.shape, np.int32).tobytes())
    return buffers


def _unpack(kernel: CapturedKernel, answer: bytes, sizes: Sequence[int]) -> list[mx.array]:
    outputs, start = [], 0
    for (shape, dtype), size in zip(kernel.outputs, sizes, strict=True):
        raw = np.frombuffer(answer[start : start + size], np.uint8)
        outputs.append(mx.array(raw).view(dtype).reshape(shape))
        start += size
    return outputs

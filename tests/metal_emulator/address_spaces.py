"""Checks that a kernel mixes no address spaces, by compiling it as C++ for OpenCL, whose spaces are Metal's.

The C++ translation drops address spaces; this is where a ``device`` pointer to an input that MLX binds as ``constant``
is found. Nothing is run.
"""

import subprocess

from .compilers import RUNTIME
from .signature import BufferParameter, parse
from .translation import without_comments


def check_address_spaces(source: str, clang: str) -> str:
    """clang's complaints about a generated kernel source; empty when there are none."""
    command = [clang, "-x", "cl", "-cl-std=clc++2021", "-target", "spir64", "-fsyntax-only", "-Wno-everything"]
    command += ["-include", str(RUNTIME / "address_spaces.h"), "-"]
    result = subprocess.run(command, input=as_opencl(source), text=True, capture_output=True, check=False)
    return result.stderr


def as_opencl(source: str) -> str:
    """The kernel as an OpenCL kernel: template arguments as definitions, references as pointers read once."""
    kernel = parse(source)
    definitions = "".join(
        f"typedef {argument} {name};\n" if kind == "typename" else f"#define {name} {argument}\n"
        for kind, name, argument in kernel.template
    )
    parameters = [_pointer(buffer) for buffer in kernel.buffers] + [f"{kind} {name}" for kind, name in kernel.builtins]
    references = "".join(
        f"{_type(buffer)}& {buffer.name} = *{buffer.name}_pointer;\n" for buffer in kernel.buffers if buffer.reference
    )
    body = without_comments(kernel.body)
    return f'{definitions}kernel void checked({", ".join(parameters)}) {{\n{references}#line 1 "kernel"\n{body}\n}}\n'


def _type(buffer: BufferParameter) -> str:
    return f"{'const ' if buffer.const else ''}{buffer.space} {buffer.dtype}"


def _pointer(buffer: BufferParameter) -> str:
    return f"{_type(buffer)}* {buffer.name}{'_pointer' if buffer.reference else ''}"

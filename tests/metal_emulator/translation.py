"""Turns a kernel that MLX generated into a C++ program, or refuses it loudly.

The body is compiled as it stands; only address spaces are dropped and threadgroup arrays become checked ones. Whatever
would compile as C++ but is not Metal, or not emulated, is refused by name first.
"""

import re

from .signature import BufferParameter, KernelSource, UnsupportedMetalError, parse

FUNCTIONS = {
    "threadgroup_barrier", "simd_shuffle", "simd_shuffle_xor", "simd_any", "simd_prefix_exclusive_sum",
    "min", "max", "as_type",
}  # fmt: skip
TYPES = {"bool", "int", "uint", "ushort", "ulong", "float", "int32_t", "uint32_t", "half", "float16_t", "bfloat16_t"}
BUILTINS = {
    "threadgroup_position_in_grid", "thread_index_in_threadgroup", "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup", "threads_per_simdgroup",
}  # fmt: skip
PRAGMAS = {"#pragma clang fp contract(off)"}
_STATEMENTS = {"if", "for", "while", "switch", "return", "sizeof"}
_NOT_IN_SUBSET = {
    "double", "long", "volatile", "static", "thread_local", "goto", "new", "delete", "throw", "try", "catch", "virtual",
    "dynamic_cast", "typeid", "std", "metal", "asm", "atomic", "atomic_uint", "atomic_int", "simd_sum",
    "simdgroup_barrier", "struct", "class", "union", "emulator",
}  # fmt: skip
_ARRAY = re.compile(r"^threadgroup (\w+) (\w+)\[([^\]]+)\];", re.MULTILINE)


def without_comments(code: str) -> str:
    """The code with comments blanked out, line numbers kept."""
    return re.sub(
        r"//[^\n]*", "", re.sub(r"/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), code, flags=re.DOTALL)
    )


def check_subset(body: str) -> None:
    """Raises :class:`UnsupportedMetalError`, naming the construct, if the body leaves the emulated subset."""
    for line in body.splitlines():
        if line.lstrip().startswith("#") and line.strip() not in PRAGMAS:
            raise UnsupportedMetalError(f"preprocessor line: {line.strip()}")
    code = re.sub(r"^\s*#.*$", "", body, flags=re.MULTILINE)
    if foreign := _NOT_IN_SUBSET & set(re.findall(r"[A-Za-z_]\w*", code)):
        raise UnsupportedMetalError(f"not in the subset: {', '.join(sorted(foreign))}")
    for called in re.findall(r"([A-Za-z_]\w*)\s*(?:<[^<>;(){}]*>)?\s*\(", code):
        if called not in FUNCTIONS | TYPES | _STATEMENTS:
            raise UnsupportedMetalError(f"not in the subset: {called}(...)")
    if "[&" in code or "[=" in code:
        raise UnsupportedMetalError("not in the subset: lambda")
    if re.search(r"\bthreadgroup\b", _ARRAY.sub("", code)):
        raise UnsupportedMetalError("threadgroup memory: only 'threadgroup TYPE NAME[SIZE];' at the top of the body")


def translate(source: str) -> str:
    """The C++ program (``runtime/program.h``) that runs the kernel ``source``."""
    kernel = parse(source)
    body = without_comments(kernel.body)
    check_subset(body)
    if unknown := {name for _, name in kernel.builtins} - BUILTINS:
        raise UnsupportedMetalError(f"builtin attribute: {', '.join(sorted(unknown))}")
    body = _ARRAY.sub(r"static emulator::Shared_array<\1, \3> \2;", body)
    body = re.sub(r"\b(?:device|constant|thread)\s+(?=\w)", "", body)
    parameters = [_parameter(buffer) for buffer in kernel.buffers] + [
        f"{kind} {name}" for kind, name in kernel.builtins
    ]
    arguments = [_argument(index, buffer) for index, buffer in enumerate(kernel.buffers)]
    arguments += [f"emulator::{name}()" for _, name in kernel.builtins]
    return (
        '#include "program.h"\n'
        f"{_head(kernel)}static void kernel({', '.join(parameters)}) {{\n"
        f'#line 1 "kernel"\n{body}\n}}\n'
        f"static void thread() {{ kernel{_instance(kernel)}({', '.join(arguments)}); }}\n"
        "int main() { return emulator::answer_request(thread); }\n"
    )


def _head(kernel: KernelSource) -> str:
    return f"template <{', '.join(f'{kind} {name}' for kind, name, _ in kernel.template)}>\n" if kernel.template else ""


def _instance(kernel: KernelSource) -> str:
    return f"<{', '.join(argument for _, _, argument in kernel.template)}>" if kernel.template else ""


def _type(buffer: BufferParameter) -> str:
    return f"{'const ' if buffer.const else ''}{buffer.dtype}"


def _parameter(buffer: BufferParameter) -> str:
    return f"{_type(buffer)}{'&' if buffer.reference else '*'} {buffer.name}"


def _argument(index: int, buffer: BufferParameter) -> str:
    return f"{'*' if buffer.reference else ''}emulator::buffer<{_type(buffer)}>({index})"

"""Reads the source that MLX generates: template line, kernel signature, body, instantiation."""

import re
from dataclasses import dataclass

_FORM = re.compile(
    r"(?:template <(?P<template>[^>]*)>\n)?"
    r"\[\[kernel\]\] void (?P<name>\w+)\(\n(?P<parameters>.*?)\) \{\n(?P<body>.*?)\n\}\n"
    r"(?:\ntemplate \[\[host_name\(\"\w+\"\)\]\] \[\[kernel\]\] decltype\(\w+<(?P<arguments>[^>]*)>\) [^;]*;\n)?\s*",
    re.DOTALL,
)
_BUFFER = re.compile(r"(const )?(device|constant) (\w+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]")
_BUILTIN = re.compile(r"(uint|uint3) (\w+) \[\[(\w+)\]\]")


class UnsupportedMetalError(ValueError):
    """The source lies outside the subset of Metal that the emulator runs (see ``runtime/metal_language.h``)."""


@dataclass(frozen=True)
class BufferParameter:
    """``const device float* x [[buffer(0)]]``; small inputs are ``constant``, those without axes references."""

    space: str
    dtype: str
    name: str
    const: bool
    reference: bool


@dataclass(frozen=True)
class KernelSource:
    """The parts of a generated kernel."""

    name: str
    template: tuple[tuple[str, str, str], ...]  # kind, name, argument: ("int", "TG", "256")
    buffers: tuple[BufferParameter, ...]
    builtins: tuple[tuple[str, str], ...]  # type, name
    body: str


def parse(source: str) -> KernelSource:
    """Splits a generated source into its parts; raises :class:`UnsupportedMetalError` for any other form."""
    form = _FORM.fullmatch(source)
    if form is None:
        raise UnsupportedMetalError(f"not the form that MLX generates:\n{source[:400]}")
    buffers: list[BufferParameter] = []
    builtins: list[tuple[str, str]] = []
    for parameter in (line.strip() for line in form["parameters"].split(",\n")):
        if found := _BUFFER.fullmatch(parameter):
            const, space, dtype, pointer, name, index = found.groups()
            if int(index) != len(buffers):
                raise UnsupportedMetalError(f"buffer {index} out of order: {parameter}")
            buffers.append(BufferParameter(space, dtype, name, bool(const), pointer == "&"))
        elif found := _BUILTIN.fullmatch(parameter):
            builtins.append((found[1], found[2]))
        else:
            raise UnsupportedMetalError(f"kernel parameter: {parameter}")
    return KernelSource(form["name"], _template(form), tuple(buffers), tuple(builtins), form["body"])


def _template(form: re.Match[str]) -> tuple[tuple[str, str, str], ...]:
    if form["template"] is None:
        return ()
    parameters = [parameter.split() for parameter in form["template"].split(", ")]
    arguments = form["arguments"].split(", ")
    return tuple((kind, name, argument) for (kind, name), argument in zip(parameters, arguments, strict=True))

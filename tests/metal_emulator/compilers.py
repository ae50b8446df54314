"""Finds the host compilers and builds programs with them, once per source."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime"
PLAIN = ("-O2",)
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
_COMMON = (
    "-std=c++17",
    "-ffp-contract=off",  # the kernels ask for it by pragma, which g++ does not know
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unknown-warning-option",
    "-Werror=uninitialized",
    "-Werror=maybe-uninitialized",
)


class CompileError(ValueError):
    """The host compiler refuses the translated kernel; the message is the compiler's."""


def cxx() -> str | None:
    """The host C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("clang++")


def clang() -> str | None:
    """clang's C++ driver, or None: it checks address spaces and the contraction pragma."""
    return shutil.which("clang++")


@cache
def build(code: str, flags: tuple[str, ...] = PLAIN) -> Path:
    """The program compiled from ``code``; kept in a folder of the system's for temporary files, so compiled once."""
    compiler = cxx()
    assert compiler is not None
    command = [compiler, *_COMMON, *flags, f"-I{RUNTIME}"]
    digest = hashlib.sha256("\0".join([code, *command, _runtime_text()]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"velox-metal-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / digest
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / "program"
        result = subprocess.run(
            [*command, "-x", "c++", "-", "-o", str(fresh)], input=code, text=True, capture_output=True, check=False
        )
        if result.returncode != 0:
            raise CompileError(result.stderr)
        fresh.replace(program)
    return program


@cache
def _runtime_text() -> str:
    return "\0".join(path.read_text(encoding="utf-8") for path in sorted(RUNTIME.glob("*.h")))

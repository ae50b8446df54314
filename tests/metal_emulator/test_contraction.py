"""The score kernel's products are not fused into multiply-adds: clang, told to fuse, obeys the kernel's pragma."""

import subprocess

from .cases import ScoreCase, Shape
from .compilers import RUNTIME
from .translation import translate

PRAGMA = "#pragma clang fp contract(off)"


def fused_operations(source: str, clang: str) -> int:
    """How many fused multiply-adds clang emits for the translated kernel when it may contract."""
    command = [clang, "-std=c++17", "-O2", "-ffp-contract=fast", "-S", "-emit-llvm", f"-I{RUNTIME}", "-x", "c++", "-"]
    result = subprocess.run([*command, "-o", "-"], input=translate(source), text=True, capture_output=True, check=True)
    return result.stdout.count("fmul contract") + result.stdout.count("llvm.fmuladd")


def test_the_pragma_forbids_contraction(clang: str) -> None:
    source = ScoreCase.draw(Shape(1, 1, 4, 64, 8), 0).captured().source
    assert fused_operations(source, clang) == 0


def test_contraction_would_happen_without_the_pragma(clang: str) -> None:
    source = ScoreCase.draw(Shape(1, 1, 4, 64, 8), 0).captured().source
    assert fused_operations(source.replace(PRAGMA, ""), clang) > 0


def test_the_pragma_stands_where_clang_allows_it() -> None:
    source = ScoreCase.draw(Shape(1, 1, 4, 64, 8), 0).captured().source
    body = source[source.index(") {\n") + 4 :]
    first = next(line for line in body.splitlines() if line.strip() and not line.startswith("//"))
    assert first == PRAGMA

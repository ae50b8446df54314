"""Compilers: a missing one skips the tests, or fails them where VELOX_REQUIRE_COMPILERS=1 promises it is there."""

import os

import pytest

from . import compilers


def _require(found: str | None, what: str) -> str:
    if found is not None:
        return found
    reason = f"{what} is not installed; the Metal emulator compiles kernels for the CPU with it"
    if os.environ.get("VELOX_REQUIRE_COMPILERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cxx() -> str:
    """Path of the host C++ compiler."""
    return _require(compilers.cxx(), "A C++ compiler (g++ or clang++)")


@pytest.fixture(scope="session")
def clang() -> str:
    """Path of clang++."""
    return _require(compilers.clang(), "clang++")

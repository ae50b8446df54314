"""Whether matrix products run on the slow BLAS that mlx brings along on Linux, and what to do about it here."""

import platform
import sys
from pathlib import Path

import mlx.core as mx

_SLOW = "/mlx_cpu.libs/libblas"
_FAST = ("libmkl_rt", "libopenblas", "libblis", "libflexiblas", "libnvpl_blas", "libarmpl")


def slow_blas_advice() -> str | None:
    """One line that says what to do in this installation; None where nothing is slow, as on Apple hardware."""
    if mx.default_device() != mx.cpu:
        return None
    loaded = _loaded_libraries()
    if _SLOW not in loaded or any(name in loaded for name in _FAST):
        return None
    found = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    if found:
        remedy = f"start again with LD_PRELOAD={found[-1]} before the command"
    elif platform.machine() == "x86_64":
        remedy = f"run `{sys.executable} -m pip install mkl` (the extra `blas`), then start again"
    else:
        remedy = "install OpenBLAS with your system's packages, and start again with LD_PRELOAD=(its libopenblas.so.0)"
    return f"matrix products run on mlx's own slow BLAS, several times slower than on a fast one: {remedy}"


def _loaded_libraries() -> str:
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""

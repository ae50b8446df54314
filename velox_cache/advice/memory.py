"""Amounts of memory: as users write them, and what this machine has free."""

import re
from pathlib import Path

import mlx.core as mx

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_of(text: str) -> int:
    """The bytes that such as 4GB, 1.5GiB, 800M or 1000000 stand for. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise ValueError(f"memory is an amount such as 4GB, 800MB or 1.5GiB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def free_bytes() -> int:
    """What this machine can give a model: on a GPU what Metal recommends, else what Linux says is available.

    Raises ValueError where neither is told.
    """
    if mx.default_device() == mx.gpu:
        told = mx.device_info().get("max_recommended_working_set_size", 0)
        if isinstance(told, int) and told > 0:
            return told
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("this machine does not say how much memory is free; give --memory, such as --memory 4GB")

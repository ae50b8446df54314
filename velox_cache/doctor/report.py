"""The report on an installation: versions and machine, whether the kernels are right, and how fast it is."""

import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("velox-kv", "mlx", "mlx-lm", "numpy", "chex", "jax", "transformers")
_CORE = "import of velox_fn, and of chex and jax with it"
_SLOW_GFLOPS = 5.0


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    name: str
    value: str
    fault: bool = False  # something is wrong, and worth an issue


def doctor() -> list[Finding]:
    """Looks at versions, machine, Metal kernels and speed. Takes a few seconds; allocates some tens of MB."""
    looks = {_CORE: _core, "mlx-lm": _protocol, "Metal kernels": _kernels, "speed": _speed}
    return [*_versions(), *_machine(), *(finding for topic, look in looks.items() for finding in _tried(topic, look))]


def as_json(findings: list[Finding]) -> list[dict[str, object]]:
    """The findings as plain JSON."""
    return [asdict(finding) for finding in findings]


def as_text(findings: list[Finding], width: int = 100) -> str:
    """The findings as text that can be pasted into an issue."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for topic in dict.fromkeys(finding.topic for finding in findings):
            table = Table(show_header=False, box=None, padding=(0, 2), title=Text(topic), title_justify="left")
            for finding in findings:
                if finding.topic == topic:
                    mark = "WRONG " if finding.fault else ""
                    table.add_row(Text(finding.name), Text(mark + finding.value))
            console.print(table)
            console.print()
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _tried(topic: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What `look` finds. An exception in it is a finding too: a kernel that does not compile, or versions of chex and
    jax that do not fit each other."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(topic, "broke off", f"{type(error).__name__}: {error}", fault=True)


def _versions() -> list[Finding]:
    found = [Finding("versions", "python", sys.version.split()[0])]
    for package in _PACKAGES:
        try:
            found.append(Finding("versions", package, version(package)))
        except PackageNotFoundError:
            found.append(Finding("versions", package, "not installed"))
    return found


def _machine() -> list[Finding]:
    import mlx.core as mx

    return [
        Finding("machine", "system", platform.platform()),
        Finding("machine", "chip", _chip()),
        Finding("machine", "MLX device", str(mx.default_device())),
    ]


def _chip() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        named = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
        named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{named or 'unknown'} ({platform.machine()})"


def _core() -> Iterator[Finding]:
    from velox_fn.engine import records

    yield Finding(_CORE, "works", records.__file__)


def _protocol() -> Iterator[Finding]:
    from velox_cache.caches.mlx_lm_protocol import TESTED, protocol_faults

    faults = protocol_faults()
    yield Finding("mlx-lm", "cache protocol", "; ".join(faults) or "the one that evicting caches speak", bool(faults))
    if faults:
        yield Finding("mlx-lm", "what to do", f"pip install '{TESTED}'")


def _kernels() -> Iterator[Finding]:
    from metal_src import metal_available

    if not metal_available():
        why = "MLX has no Metal backend or the default device is not the GPU; MLX operations are used instead"
        yield Finding("Metal kernels", "available", f"no: {why}")
        yield Finding("Metal kernels", "parity", "not run here; the tests run the kernels' source on the CPU")
        return
    from velox_cache.doctor.kernel_parity import compare_kernels

    yield Finding("Metal kernels", "available", "yes")
    for parity in compare_kernels():
        same = f"{parity.elements} elements, the same bits"
        value = f"{parity.differing} of {parity.elements} elements differ" if parity.differing else same
        yield Finding("Metal kernels", f"{parity.kernel} {parity.case}", value, fault=parity.differing > 0)


def _speed() -> list[Finding]:
    from velox_cache.doctor import timings
    from velox_cache.slow_blas import slow_blas_advice

    gflops = timings.matrix_product_gflops()
    advice = slow_blas_advice()
    hint = "" if gflops >= _SLOW_GFLOPS or advice is None else f"; {advice}"
    evictions = timings.block_eviction_ms()
    return [
        Finding("speed", "float32 matrix product", f"{gflops:.1f} GFLOP/s{hint}"),
        *(Finding("speed", f"evict a block, {name}", f"{milliseconds:.2f} ms") for name, milliseconds in evictions),
        Finding("speed", "decode step over budget", f"{timings.decode_step_ms():.2f} ms"),
        Finding("speed", "measured with", timings.SETTING),
    ]

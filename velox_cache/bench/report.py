"""A benchmark as JSON, as tables, and against an earlier one."""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from velox_cache.bench.arms import Shape
from velox_cache.bench.end_to_end import Run
from velox_cache.bench.rounds import Comparison, Timing, compare
from velox_cache.file_checks import file_text

FORMAT_VERSION = 1
CONSPICUOUS = 1.5  # times an earlier ratio; noise on a shared machine stays below


@dataclass(frozen=True)
class Report:
    """What one run measured, and where."""

    machine: dict[str, Any]
    comparisons: tuple[Comparison, ...] = ()
    runs: tuple[Run, ...] = ()
    model: str | None = None
    format: int = field(default=FORMAT_VERSION, kw_only=True)


def machine() -> dict[str, Any]:
    """Where this runs; copy bandwidth counts what is read and what is written."""
    return {
        "platform": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device": str(mx.default_device()),
        "copy_gb_per_s": round(copy_bandwidth() / 1e9, 2),
        "versions": {name: _version(name) for name in ("velox-kv", "mlx", "mlx-lm", "veloxquant-mlx")},
    }


def copy_bandwidth() -> float:
    """Bytes a second (on a CPU, of its own time) that MLX copies: what moves rows takes its bytes over this."""
    keys, values = Shape(n_kv_heads=32).block(2048)
    taken = compare("copy", "", {"copy": lambda: mx.eval(mx.concatenate([keys, values], axis=2))}, rounds=9)
    spent = taken.reference.median_us if mx.default_device() == mx.gpu else taken.reference.cpu_us
    return 2 * (keys.nbytes + values.nbytes) / (spent / 1e6)


def write(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=1) + "\n")


def read(path: Path) -> Report:
    """A report that `write` made. Raises FileNotFoundError, and ValueError when it is something else."""
    text = file_text(path)
    try:
        found = json.loads(text)
        if found["format"] != FORMAT_VERSION:
            raise ValueError(f"{path} has format {found['format']}; this velox-kv reads {FORMAT_VERSION}")
        return from_plain(found)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no benchmark report; make one with velox bench --json {path}") from error


def from_plain(found: dict[str, Any]) -> Report:
    """The report that `dataclasses.asdict` made plain. KeyError or TypeError for anything else."""
    comparisons = tuple(
        Comparison(one["name"], one["setting"], tuple(Timing(**timing) for timing in one["timings"]))
        for one in found["comparisons"]
    )
    runs = tuple(
        Run(**{**run, "decode_tokens_per_second": tuple(run["decode_tokens_per_second"])}) for run in found["runs"]
    )
    return Report(found["machine"], comparisons, runs, found["model"])


def comparison_table(comparison: Comparison) -> Table:
    """One comparison."""
    table = Table(title=f"{comparison.name}: {comparison.setting}", title_justify="left")
    table.add_column("")
    for heading in ("us", "ratio", "quartiles", "CPU us", "CPU ratio"):
        table.add_column(heading, justify="right")
    for timing in comparison.timings:
        spread = f"{timing.ratio_low:.2f} - {timing.ratio_high:.2f}"
        table.add_row(
            timing.label,
            f"{timing.median_us:,.0f}",
            f"{timing.ratio:.2f}",
            spread,
            f"{timing.cpu_us:,.0f}",
            f"{timing.cpu_ratio:.2f}",
        )
    return table


def runs_table(runs: Sequence[Run]) -> Table:
    """The end-to-end runs."""
    table = Table(title="end to end", title_justify="left")
    headings = (
        "budget",
        "tok/s",
        "lowest - highest",
        "prefill tok/s",
        "peak MiB",
        "rows",
        "cache MiB",
        "cache's share",
    )
    table.add_column("cache")
    for heading in headings:
        table.add_column(heading, justify="right")
    for run in runs:
        rate, low, high = run.decode_tokens_per_second
        table.add_row(
            run.label,
            "-" if run.budget is None else str(run.budget),
            f"{rate:.1f}",
            f"{low:.1f} - {high:.1f}",
            f"{run.prefill_tokens_per_second:.0f}",
            f"{run.peak_bytes / 2**20:.0f}",
            f"{run.most_rows:,}",
            f"{run.cache_bytes / 2**20:.1f}",
            f"{run.cache_share:.1%}",
        )
    return table


def changes(now: Report, before: Report) -> Iterator[str]:
    """A line for each ratio of processor times that both reports hold; conspicuous ones are marked, no more."""
    earlier = {
        (one.name, one.setting, timing.label): timing.cpu_ratio for one in before.comparisons for timing in one.timings
    }
    for one in now.comparisons:
        for timing in one.timings[1:]:
            old = earlier.get((one.name, one.setting, timing.label))
            if old is not None:
                mark = "  <-- slower, look again" if timing.cpu_ratio > CONSPICUOUS * old else ""
                yield f"{one.name}, {one.setting}, {timing.label}: {timing.cpu_ratio:.2f} ({old:.2f} committed){mark}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""What one machine does with this library, in one file to attach to an issue; and a table of such files."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.bench.end_to_end import end_to_end
from velox_cache.bench.operations import Plan, measure
from velox_cache.bench.report import Report, from_plain, machine
from velox_cache.calibration.artifact import Calibration
from velox_cache.doctor.report import Finding, doctor
from velox_cache.file_checks import file_text
from velox_cache.recommended import RECOMMENDED_METHOD

FORMAT_VERSION = 1
BUDGET = 256  # of the model's runs, after a prompt of 1,024 tokens
_ROUNDS = 8


@dataclass(frozen=True)
class MachineReport:
    """Findings of `velox doctor`, times of every operation beside mlx_lm's, and one model with and without bounds."""

    made: str  # the day, ISO
    findings: tuple[Finding, ...]
    bench: Report


def measured(
    name: str,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    calibration: Calibration,
    *,
    plan: Plan | None = None,
    advance: Callable[[str], object] = lambda what: None,
) -> MachineReport:
    """Look, time, run: within three minutes on two slow cores, with a model of SmolLM2's size.

    plan: the operations' sizes, where others are wanted. `advance` is told what was done. The model ends up with its
    own caches.
    """
    findings = [_without_paths(finding) for finding in doctor()]
    advance("doctor")
    comparisons = []
    for one in measure(plan or Plan(budgets=(512,), rounds=_ROUNDS)):
        comparisons.append(one)
        advance(f"{one.name}, {one.setting}")
    runs = end_to_end(
        model,
        tokenizer,
        budgets=(BUDGET,),
        rounds=1,
        calibration=calibration,
        methods=(RECOMMENDED_METHOD,),
        advance=advance,
    )
    bench = Report(machine(), tuple(comparisons), tuple(runs), name)
    return MachineReport(datetime.now(UTC).date().isoformat(), tuple(findings), bench)


def write_machine_report(report: MachineReport, path: Path) -> None:
    """As JSON."""
    plain = {"format": FORMAT_VERSION, "kind": "machine report", **asdict(report)}
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def read_machine_report(path: Path) -> MachineReport:
    """What `write_machine_report` wrote. Raises FileNotFoundError, and ValueError when it is something else."""
    try:
        found: dict[str, Any] = json.loads(file_text(path))
        if (found["kind"], found["format"]) != ("machine report", FORMAT_VERSION):
            raise ValueError(f"{path} has format {found['format']}; this velox-kv reads {FORMAT_VERSION}")
        findings = tuple(Finding(**finding) for finding in found["findings"])
        return MachineReport(found["made"], findings, from_plain(found["bench"]))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no machine report; make one with velox bench --report {path}") from error


def table(reports: Sequence[MachineReport]) -> str:
    """A Markdown table, a row for each machine."""
    heads = (
        "machine",
        "made",
        "MLX",
        "Metal kernels",
        "decode step over budget, us",
        "of it to mlx_lm's window",
        "tok/s, full cache",
        f"tok/s, {RECOMMENDED_METHOD}",
        "peak MiB, full",
        "peak MiB, bounded",
    )
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*rows, *(f"| {' | '.join(_row(report))} |" for report in reports)])


def _without_paths(finding: Finding) -> Finding:
    """Nothing that names a user or a folder, since the file is for others to read."""
    value = finding.value
    for root in (sys.prefix, str(Path(__file__).parents[2]), str(Path.home())):
        value = value.replace(root, "...")
    return replace(finding, value=value)


def _row(report: MachineReport) -> list[str]:
    found = {(finding.topic, finding.name): finding.value for finding in report.findings}
    parities = [finding for finding in report.findings if finding.topic == "Metal kernels" and "_" in finding.name]
    wrong = sum(finding.fault for finding in parities)
    parity = f"{len(parities) - wrong} of {len(parities)} right" if parities else "none here"
    steps = [
        timing
        for comparison in report.bench.comparisons
        if comparison.name == "decode over budget"
        for timing in comparison.timings
        if timing.label == RECOMMENDED_METHOD
    ]
    runs = {run.label: run for run in report.bench.runs}
    pair = [runs.get(label) for label in ("KVCache", RECOMMENDED_METHOD)]
    return [
        f"{found.get(('machine', 'chip'), 'unknown')}, {report.bench.machine['device']}",
        report.made,
        str(report.bench.machine["versions"].get("mlx")),
        parity,
        f"{steps[0].median_us:,.0f}" if steps else "-",
        f"{steps[0].ratio:.1f}x" if steps else "-",
        *("-" if run is None else f"{run.decode_tokens_per_second[0]:.1f}" for run in pair),
        *("-" if run is None else f"{run.peak_bytes / 2**20:.0f}" for run in pair),
    ]

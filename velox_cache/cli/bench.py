"""Time the caches' operations beside mlx_lm's own caches, in turn, and print medians and ratios.

Where veloxquant-mlx is installed (`make bench-peers`) its Q-Filters cache takes its turn too. Only figures of one run
compare with each other.
"""

import argparse
from pathlib import Path

from velox_cache.cli.calibration_argument import add_calibration_argument

EXAMPLES = """examples:
  velox bench --quick
  velox bench --report my-mac.json
  velox bench --json bench.json --plot bench.png
  velox bench --quick --against docs/results/bench-linux-cpu.json
  velox bench --only-model --model smollm2-135m --budgets 256,512
  velox bench --only-model --model smollm2-135m --budgets 512 --methods qfilters --model-rounds 10"""

_TURNS_PER_RUN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox bench`."""
    parser.add_argument("--quick", action="store_true", help="decode steps and prefill of the static methods only")
    parser.add_argument("--budgets", type=_numbers, metavar="N,N", help="rows to keep (default: 512,2048)")
    parser.add_argument("--batches", type=_numbers, default=(1,), metavar="N,N", help="batch sizes (default: 1)")
    parser.add_argument(
        "--dtypes", type=_names, default=("float16",), metavar="T,T", help="dtypes of K and V (default: float16)"
    )
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="turns that each cache takes (default: 40)")
    parser.add_argument("--model", metavar="MODEL", help="run this model end to end as well")
    add_calibration_argument(parser, "calibration of MODEL (default: filters from its first keys)")
    parser.add_argument(
        "--model-rounds", type=int, default=3, metavar="N", help="runs of the caches that take turns (default: 3)"
    )
    parser.add_argument(
        "--methods",
        type=_methods,
        metavar="M,M",
        help="under MODEL only these, all taking turns (default: all methods)",
    )
    parser.add_argument("--only-model", action="store_true", help="nothing but the model's runs")
    parser.add_argument(
        "--tiers", action="store_true", help="nothing but tokens under MODEL with heads in one, two and three tiers"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write one file about this machine, to attach to an issue: all operations and one model, in a few minutes",
    )
    parser.add_argument(
        "--reports", type=Path, nargs="+", metavar="FILE", help="print a table of such files, and measure nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios there")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="print ratios beside those of an earlier report; never fails on them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write."""
    if arguments.reports is not None:
        from velox_cache.bench.machine_report import read_machine_report, table

        print(table([read_machine_report(path) for path in arguments.reports]))
        return 0
    if arguments.report is not None:
        return _report(arguments.model, arguments.report)
    if arguments.tiers:
        return _tiers(arguments.model, arguments.budgets or (512,), arguments.model_rounds)
    from collections.abc import Iterable
    from dataclasses import replace

    import mlx.core as mx
    from rich.console import Console

    from velox_cache.bench.decoding import decoding_in_turns
    from velox_cache.bench.end_to_end import Run, end_to_end
    from velox_cache.bench.figure import draw
    from velox_cache.bench.imports import import_costs
    from velox_cache.bench.operations import Plan, measure
    from velox_cache.bench.report import Report, changes, comparison_table, machine, read, runs_table, write
    from velox_cache.bench.rounds import Comparison

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    earlier = None if arguments.against is None else read(arguments.against)
    report = Report(machine(), model=arguments.model)

    def add(parts: Iterable[Comparison | Run]) -> None:
        nonlocal report
        for part in parts:
            if isinstance(part, Run):
                report = replace(report, runs=(*report.runs, part))
            else:
                report = replace(report, comparisons=(*report.comparisons, part))
                console.print(comparison_table(part))
            if arguments.json is not None:  # each time: a run that is cut short leaves what it had
                write(report, arguments.json)

    if not arguments.only_model:
        budgets = arguments.budgets or ((512,) if arguments.quick else (512, 2048))
        dtypes = tuple(getattr(mx, name) for name in arguments.dtypes)
        add(measure(Plan(budgets, dtypes, arguments.batches, arguments.rounds, arguments.quick)))
        if not arguments.quick:
            add(import_costs(rounds=5))
    if arguments.model is not None:
        from velox_cache.calibration.artifact import load_calibration
        from velox_cache.cli.model_argument import load_model

        model, tokenizer = load_model(arguments.model)
        calibration = None if arguments.calibration is None else load_calibration(arguments.calibration)
        budgets = arguments.budgets or (512, 256)
        rounds = arguments.model_rounds
        options = {"budgets": budgets, "calibration": calibration, "methods": arguments.methods, "advance": console.log}
        add(decoding_in_turns(model, tokenizer, rounds=_TURNS_PER_RUN * rounds, **options))
        add(end_to_end(model, tokenizer, rounds=rounds, **options))
        console.print(runs_table(report.runs))
    if arguments.plot is not None:
        draw(report.comparisons, arguments.plot)
    if earlier is not None:
        for line in changes(report, earlier):
            console.print(line, soft_wrap=True, highlight=False)
    return 0


def _tiers(model_name: str | None, budgets: tuple[int, ...], rounds: int) -> int:
    from rich.console import Console

    from velox_cache.bench.report import comparison_table
    from velox_cache.bench.tier_steps import tier_steps
    from velox_cache.cli.model_argument import load_model
    from velox_cache.models import fetch_model

    model, tokenizer = load_model(model_name or str(fetch_model("smollm2-135m")))
    for budget in budgets:
        Console(width=150).print(
            comparison_table(tier_steps(model, tokenizer, budget=budget, rounds=_TURNS_PER_RUN * rounds))
        )
    return 0


def _report(model_name: str | None, path: Path) -> int:
    import sys
    import time

    from velox_cache.bench.machine_report import measured, table, write_machine_report
    from velox_cache.calibration.made_once import found_calibration, made_calibration
    from velox_cache.cli.model_argument import load_model, model_id
    from velox_cache.file_checks import check_folder_of
    from velox_cache.models import fetch_model

    check_folder_of(path)
    began = time.monotonic()

    def advance(what: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {what}", file=sys.stderr, flush=True)

    model_name = model_name or str(fetch_model("smollm2-135m"))
    model, tokenizer = load_model(model_name)
    calibration = found_calibration(model) or made_calibration(model, tokenizer, n_tokens=512)
    report = measured(model_id(model_name), model, tokenizer, calibration, advance=advance)
    write_machine_report(report, path)
    print(f"{table([report])}\n\n{path}: attach this file to an issue; it names no user, host or path")
    return int(any(finding.fault for finding in report.findings))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0, such as 512,2048")
    return numbers


def _methods(text: str) -> tuple[str, ...]:
    from velox_cache.known_methods import known_methods

    names = tuple(text.split(","))
    if not set(names) <= set(known_methods()):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of methods among {', '.join(known_methods())}")
    return names


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    known = ("float16", "bfloat16", "float32")
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of dtypes among {', '.join(known)}")
    return names

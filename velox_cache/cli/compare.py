"""Compare eviction methods on a model: contexts first, questions later, at shares of the context's rows.

Each context is read once, by the model with its full cache; each arm then evicts from its rows, and what continues the
context or asks about it comes after that. Texts and seeds come in two halves: `choice`, which choices may look at, and
`report`, for the table that is shown; a folder holds results of one of them.

Results land in the output folder cell by cell (cells.jsonl). An interrupted run goes on where it stopped, and a later
one with more methods, shares, kinds or contexts measures only what is new. Beside the cells, the folder gets
results.json, results.md and figures. Under mlx.launch the ranks, each with the whole model, share the measurements out.
"""

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from velox_cache.cli.calibration_argument import add_calibration_argument
from velox_cache.cli.model_argument import add_model_argument, load_model, model_id
from velox_cache.distributed.launcher import launched_rank

if TYPE_CHECKING:
    from velox_cache.calibration.artifact import Calibration
    from velox_cache.evaluation.compare import Contender

DEFAULT_METHODS = (
    "learned,fusion,qfilters,curdkv,expected_attention,triattention,keydiff,lagkv,l2norm,h2o,keyformer,snapkv,morphkv,"
    "tova,streaming_llm,qfilters:calibrated=false,random"
)
SMOKE = {
    "methods": "fusion,qfilters,streaming_llm",
    "shares": "1/4",
    "kinds": "prose",
    "contexts": 1,
    "length": 1024,
    "continuation": 16,
    "tasks": "needle,key_value",
    "traces": 0,
    "ceilings": "oracle",
    "calibration_tokens": 1024,
}
EXAMPLES = """examples:
  velox compare smollm2-135m --half choice --methods fusion,qfilters --contexts 2 --length 1024 --shares 1/4
  velox compare smollm2-135m --contexts 8 --length 4096 --shares 1/2,1/4,1/8,1/16 --traces 2 --query-aware
  velox compare MODEL --calibration calibration.npz --methods qfilters:recent=1/2,qfilters --kinds novel.txt
  velox compare smollm2-135m --smoke

A method is named as in `velox methods`, with settings after colons, such as qfilters:recent=1/4 (a share of the
budget); `calibrated=false` leaves the calibration out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox compare`."""
    add_model_argument(parser)
    parser.add_argument("--half", choices=("choice", "report"), default="report", help="of texts (default: report)")
    parser.add_argument("--methods", default=DEFAULT_METHODS, metavar="M,M", help=f"(default: {DEFAULT_METHODS})")
    parser.add_argument("--ceilings", default="oracle,repeat", metavar="C,C", help="beside them; or none")
    parser.add_argument("--shares", default="1/4,1/8", metavar="S,S", help="of the rows (default: 1/4,1/8)")
    parser.add_argument("--budgets", metavar="N,N", help="rows kept, in place of --shares")
    parser.add_argument(
        "--recent",
        default="1/4",
        metavar="S",
        help="latest rows in every arm that has such: a share of the budget",
    )
    parser.add_argument(
        "--kinds", default="all", metavar="K,K", help="of text: prose, technical, code, dialogue, or UTF-8 files"
    )
    parser.add_argument("--contexts", type=int, default=2, metavar="N", help="of each kind (default: 2)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of each (default: 2048)")
    parser.add_argument(
        "--block", type=int, default=256, metavar="N", help="tokens between evictions; 0: all (default: 256)"
    )
    parser.add_argument("--tasks", default="all", metavar="T,T", help="what is asked; all, or none (default: all)")
    parser.add_argument("--continuation", type=int, default=64, metavar="N", help="tokens then predicted (default: 64)")
    parser.add_argument("--query-aware", action="store_true", help="ask also with the question seen first")
    parser.add_argument("--traces", type=int, default=0, metavar="N", help="of each kind (default: 0)")
    parser.add_argument("--trace-length", type=int, default=2000, metavar="N", help="tokens of each (default: 2000)")
    parser.add_argument(
        "--against", default="streaming_llm", metavar="M", help="KL is relative to its (default: %(default)s)"
    )
    add_calibration_argument(parser, "calibration of MODEL (default: the one in the cache folder, made once)")
    parser.add_argument(
        "--calibration-tokens", type=int, metavar="N", help="calibrate on so many instead, for this folder alone"
    )
    parser.add_argument("--rows", metavar="FOLDER", help="where contexts' rows are kept (default: the user's cache)")
    parser.add_argument("--out", metavar="FOLDER", help="where results go (default: compare-MODEL-HALF)")
    parser.add_argument("--no-figures", action="store_true", help="write no PNG files")
    parser.add_argument("--smoke", action="store_true", help="a small form of everything, in less than a minute")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, measure, write, print."""
    from velox_cache.distributed.collectives import world
    from velox_cache.evaluation import measurements, report
    from velox_cache.evaluation.cells import Cells
    from velox_cache.evaluation.compare import compare
    from velox_cache.evaluation.context_runs import model_digest
    from velox_cache.evaluation.markdown import to_markdown
    from velox_cache.evaluation.questions import TASKS
    from velox_cache.evaluation.text_kinds import KINDS
    from velox_cache.evaluation.windows import windows_note
    from velox_cache.harness.arms import FULL
    from velox_cache.models.fetch import default_cache_dir
    from velox_cache.progress import told_progress

    if arguments.smoke:
        vars(arguments).update(SMOKE)
    if arguments.budgets:
        arguments.shares = ",".join(f"{_rows(budget)}/{arguments.length}" for budget in _listed(arguments.budgets))
    work = measurements.Workload(
        half=arguments.half,
        kinds=tuple(KINDS) if arguments.kinds == "all" else _listed(arguments.kinds),
        n_contexts=arguments.contexts,
        length=arguments.length,
        n_continuation=arguments.continuation,
        tasks=tuple(TASKS) if arguments.tasks == "all" else _listed(arguments.tasks),
        block=arguments.block,
        aware=arguments.query_aware,
        n_traces=arguments.traces,
        trace_length=arguments.trace_length,
    )
    name = model_id(arguments.model)
    folder = Path(arguments.out or f"compare-{name.replace('/', '--')}-{work.half}")
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, work.half)
    model, tokenizer = load_model(arguments.model)
    group = world()
    calibration = _calibration(arguments, model, tokenizer, name, folder, group)
    weights = model_digest(model)
    rows_folder = Path(arguments.rows or default_cache_dir().parent / "contexts") / weights
    wanted = measurements.contexts(model, tokenizer, work, rows_folder)
    traces = measurements.traces(model, tokenizer, work)
    identity = {"model": name, "weights": weights, "version": report.environment()["versions"]}
    cells = Cells(folder / "cells.jsonl", identity)
    contenders = _contenders(arguments, model, calibration, work.length, ceilings=True)
    tracing = _contenders(arguments, model, calibration, work.trace_length, ceilings=False) if traces else []
    with told_progress(sum(one.n_tokens for one in wanted + traces)) as advance:
        rows = compare(wanted, contenders, cells, advance, group)
        if traces:
            rows += compare(traces, tracing, cells, advance, group)
    if launched_rank():
        return 0
    about = {
        "model": name,
        "calibration": {"tokens": calibration.n_tokens, "dataset": calibration.dataset},
        "command": shlex.join(["velox", *sys.argv[1:]]),
        "workload": dataclasses.asdict(work),
        "arms": [
            {"arm": one.arm.label, "share": one.share, "settings": one.settings, "calibrated": one.calibrated}
            for one in contenders
        ],
        "environment": report.environment(),
    }
    against = arguments.against if any(one.arm.label == arguments.against for one in contenders) else None
    tables = f"{to_markdown(rows, FULL.label, against)}\n{windows_note(contenders)}\n"
    (folder / "results.json").write_text(report.to_json(rows, about))
    (folder / "results.md").write_text(tables)
    if not arguments.no_figures:
        from velox_cache.evaluation.figures import save_figures

        save_figures(rows, FULL.label, folder, f"{name}, {work.length} tokens, {work.half} half")
    print(tables)
    print(f"{folder}: results.json, results.md{'' if arguments.no_figures else ' and figures'}; rows in {rows_folder}")
    return 0


def _claim(folder: Path, half: str) -> None:
    """ValueError when the folder holds results of the other half."""
    marker = folder / "half.txt"
    held = marker.read_text().strip() if marker.exists() else half
    if held != half:
        raise ValueError(
            f"{folder} holds results of the half {held!r}; --half {half} would mix what choices were made on with what "
            "reports them. Give another --out"
        )
    marker.write_text(f"{half}\n")


def _contenders(
    arguments: argparse.Namespace, model: Any, calibration: "Calibration", length: int, *, ceilings: bool
) -> "list[Contender]":
    """The full cache, each method and each ceiling at each share of `length` rows, with equal windows."""
    from velox_cache.evaluation.ceilings import CEILINGS
    from velox_cache.evaluation.compare import Contender
    from velox_cache.harness.arms import FULL, Arm, cache_maker, parse_arm
    from velox_cache.harness.unreached import warn_where_nothing_leaves

    found = [Contender(FULL, cache_maker(model, FULL))]
    for share in _listed(arguments.shares):
        budget = _part(share, length, "--budgets" if arguments.budgets else "--shares")
        recent = _part(arguments.recent, budget, "--recent")
        warn_where_nothing_leaves([budget], length + arguments.continuation)
        for method in _listed(arguments.methods):
            arm = parse_arm(method, budget, recent)
            found.append(Contender(arm, cache_maker(model, arm, calibration), share))
        for name in _listed(arguments.ceilings) if ceilings else ():
            if name not in CEILINGS:
                raise ValueError(f"there is no ceiling {name!r}; the ceilings are {', '.join(CEILINGS)}")
            found.append(Contender(Arm(name, name, {"budget": budget, "recent": recent}), list, share))
    return found


def _rows(budget: str) -> int:
    if not budget.isdigit() or int(budget) == 0:
        raise ValueError(f"--budgets takes numbers of rows such as 256, got {budget!r}; --shares takes shares")
    return int(budget)


def _part(share: str, whole: int, option: str) -> int:
    above, slash, below = share.partition("/")
    sound = bool(slash) and above.isdigit() and below.isdigit() and int(below) > 0
    if not sound or (int(above) > int(below) and option != "--budgets"):  # rows may be more than the context has
        raise ValueError(f"{option} takes shares such as 1/4, got {share!r}")
    return whole * int(above) // int(below)


def _calibration(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, name: str, folder: Path, group: Any
) -> "Calibration":
    """The one given, or the folder's own, so that later runs go on with what its results were made with.

    A folder that has none gets a copy of the one in the cache folder, which is made where there is none, or one of the
    number of tokens that was asked for.
    """
    from velox_cache import calibrate, load_calibration, save_calibration
    from velox_cache.calibration.made_once import TOKENS, check_weights, found_calibration, made_calibration
    from velox_cache.calibration.texts import SOURCE, calibration_texts
    from velox_cache.distributed.collectives import on_all_ranks
    from velox_cache.harness.arms import parse_arm
    from velox_cache.installation.shares import CALIBRATED
    from velox_cache.recommended import AUTO

    if arguments.calibration:
        given = load_calibration(arguments.calibration)
        check_weights(given, model)
        return given
    asked = (parse_arm(method, 1).settings.get("shares") for method in _listed(arguments.methods))
    n_tokens, losses = arguments.calibration_tokens, any(rule in (AUTO, *CALIBRATED) for rule in asked)
    own = folder / ("calibration.npz" if n_tokens is None else f"calibration-{n_tokens}.npz")
    if on_all_ranks(own.exists(), group):
        return load_calibration(own)
    found = found_calibration(model) if n_tokens is None else None
    if found is not None and losses and found.losses is None:
        found = None
    if not on_all_ranks(found is not None, group):
        found = None
    if found is None and n_tokens is None and group is None:
        found = made_calibration(model, tokenizer, model_id=name, losses=losses)
    if found is None:
        texts, n_tokens = calibration_texts(), n_tokens or TOKENS
        found = calibrate(
            model,
            tokenizer,
            texts,
            max_tokens=n_tokens,
            model_id=name,
            dataset=SOURCE,
            group=group,
            losses=losses,
        )
    save_calibration(found, own)
    return found


def _listed(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())

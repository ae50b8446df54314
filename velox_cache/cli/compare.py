"""Compare eviction methods on a model of your own: perplexity, fidelity, tasks, attention, and what each keeps.

The full cache runs first. On tasks that it cannot do itself, the methods do not run. Each number is stored in the
output folder as soon as it is measured. So an interrupted run goes on where it stopped, and a later one with more
methods, budgets, texts or tasks measures only what is new. The folder also gets results.json, results.csv, results.md
and figures. Under mlx.launch the ranks, each with the whole model, share the measurements out.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from velox_cache.cli.calibration_argument import add_calibration_argument
from velox_cache.cli.model_argument import add_model_argument, load_model, model_id
from velox_cache.distributed.launcher import launched_rank

if TYPE_CHECKING:
    from velox_cache.harness.arms import Arm

DEFAULT_METHODS = "fusion,qfilters,qfilters:calibrated=false,streaming_llm,l2norm,keydiff,h2o,snapkv,random"
EXAMPLES = """examples:
  velox compare smollm2-135m --methods fusion,qfilters,streaming_llm --budgets 128,256
  velox compare MODEL --calibration calibration.npz --methods qfilters:recent=0,qfilters --budgets 512 --texts novel.txt
  velox compare MODEL --tasks none --texts documentation,licence
  velox compare MODEL --texts none --tasks needle,two_hop --seeds 20

A method is named as in `velox methods`, with settings after colons, such as qfilters:recent=1/4 (a share of the
budget); `calibrated=false` leaves the calibration out. Texts are documentation, licence, code, or UTF-8 files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox compare`."""
    add_model_argument(parser)
    parser.add_argument("--methods", default=DEFAULT_METHODS, metavar="M,M", help=f"(default: {DEFAULT_METHODS})")
    parser.add_argument("--budgets", default="128,256,512", metavar="N,N", help="rows kept (default: 128,256,512)")
    parser.add_argument("--texts", default="documentation,licence,code", metavar="T,T", help="what to read; or none")
    parser.add_argument("--tasks", default="all", metavar="T,T", help="tasks to run; all, or none (default: all)")
    parser.add_argument("--context", type=int, default=1536, metavar="N", help="tokens read first (default: 1536)")
    parser.add_argument("--scored", type=int, default=96, metavar="N", help="tokens then predicted (default: 96)")
    parser.add_argument("--passages", type=int, default=2, metavar="N", help="passages of each text (default: 2)")
    parser.add_argument("--filler", type=int, default=1024, metavar="N", help="tokens of a task's text (default: 1024)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="prompts of each task (default: 5)")
    parser.add_argument("--reply", type=int, default=20, metavar="N", help="most tokens of a reply (default: 20)")
    parser.add_argument(
        "--all-tasks",
        action="store_true",
        help="run all methods on tasks that the full cache cannot do, too, without trying it first",
    )
    parser.add_argument(
        "--against",
        default="qfilters:calibrated=false",
        metavar="M",
        help="the method that the tables set the others beside, where it is among them (default: %(default)s)",
    )
    parser.add_argument("--no-heads", action="store_true", help="leave attention, anisotropy and kept positions out")
    add_calibration_argument(parser, "calibration of MODEL (default: calibrate now)")
    parser.add_argument("--calibration-tokens", type=int, default=3072, metavar="N", help="for that (default: 3072)")
    parser.add_argument("--out", metavar="FOLDER", help="where results go (default: compare-MODEL)")
    parser.add_argument("--no-figures", action="store_true", help="write no PNG files")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, measure, write, print."""
    from rich.console import Console

    from velox_cache.cli.progress import progress_bar
    from velox_cache.distributed.collectives import world
    from velox_cache.evaluation import measurements, report
    from velox_cache.evaluation.cells import Cells
    from velox_cache.evaluation.compare import Contender, Row, compare
    from velox_cache.evaluation.markdown import to_markdown
    from velox_cache.evaluation.tasks import TASKS
    from velox_cache.harness.arms import FULL, cache_maker

    budgets = [_count("--budgets", budget) for budget in _listed(arguments.budgets)]
    arms = _arms(_listed(arguments.methods), budgets)
    work = measurements.Workload(
        texts=_listed(arguments.texts),
        n_context=arguments.context,
        n_scored=arguments.scored,
        n_passages=arguments.passages,
        tasks=tuple(TASKS) if arguments.tasks == "all" else _listed(arguments.tasks),
        n_filler=arguments.filler,
        n_seeds=arguments.seeds,
        n_reply=arguments.reply,
    )
    model, tokenizer = load_model(arguments.model)
    name = model_id(arguments.model)
    folder = Path(arguments.out or f"compare-{name.replace('/', '--')}")
    folder.mkdir(parents=True, exist_ok=True)
    group = world()
    calibration, digest = _calibration(arguments, model, tokenizer, name, folder, group)
    contenders = [Contender(arm, cache_maker(model, arm, calibration)) for arm in (FULL, *arms)]
    wanted = measurements.reading(model, tokenizer, work)
    if work.texts and not arguments.no_heads:
        wanted = measurements.heads(model, tokenizer, calibration, work, min(budgets)) + wanted
    cells = Cells(folder / "cells", {"model": name, "filters": digest, "version": report.environment()["versions"]})
    asked = measurements.tasks(model, tokenizer, work)
    with progress_bar() as bar:
        task = bar.add_task("", total=sum(one.n_tokens for one in wanted) + 2 * sum(one.n_tokens for one in asked))

        def advance(what: str, n_tokens: int) -> None:
            bar.update(task, description=what, advance=n_tokens)

        left_out: list[Row] = []
        if not arguments.all_tasks:
            ceilings = compare(asked, contenders[:1], cells, advance, group)
            can = report.task_verdicts(ceilings, FULL.label)
            left_out = [one for one in ceilings if not can[one.subject]]
            asked = [one for one in asked if can[one.subject]]
        rows = compare(wanted + asked, contenders, cells, advance, group) + left_out
    if launched_rank():
        return 0
    about = {
        "model": name,
        "filters": {"tokens": calibration.n_tokens, "dataset": calibration.dataset, "digest": digest},
        "command": shlex.join(["velox", *sys.argv[1:]]),
        "workload": vars(work),
        "arms": [{"arm": one.arm.label, "settings": one.settings} for one in contenders],
        "environment": report.environment(),
    }
    named = arguments.against if any(arm.label == arguments.against for arm in arms) else None
    tables = to_markdown(rows, FULL.label, named)
    for file, text in {
        "results.json": report.to_json(rows, about),
        "results.csv": report.to_csv(rows),
        "results.md": tables,
    }.items():
        (folder / file).write_text(text)
    if not arguments.no_figures:
        from velox_cache.evaluation.figures import save_figures

        save_figures(rows, FULL.label, folder, name)
    Console(width=None if sys.stdout.isatty() else 200).print(tables, markup=False, highlight=False, soft_wrap=True)
    print(f"{folder}: results.json, results.csv, results.md{'' if arguments.no_figures else ' and figures'}")
    return 0


def _calibration(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, name: str, folder: Path, group: Any
) -> tuple[Any, str]:
    """The calibration to use, and a fingerprint of it. One made here stays in the folder, for the next run."""
    import hashlib

    import numpy as np

    from velox_cache import calibrate, load_calibration, save_calibration
    from velox_cache.calibration.texts import SOURCE, calibration_texts
    from velox_cache.distributed.collectives import on_all_ranks

    own = folder / f"calibration-{arguments.calibration_tokens}.npz"
    if not arguments.calibration and not on_all_ranks(own.exists(), group):
        made = calibrate(
            model,
            tokenizer,
            calibration_texts(),
            max_tokens=arguments.calibration_tokens,
            model_id=name,
            dataset=SOURCE,
            group=group,
        )
        save_calibration(made, own)
    calibration = load_calibration(arguments.calibration or own)
    digest = hashlib.sha256()
    for filters in calibration.filters:
        digest.update(b"" if filters is None else np.asarray(filters).tobytes())
    for layer in calibration.statistics:
        if layer is not None and layer.fusion_weights is not None:  # the other statistics follow from the same text
            digest.update(np.asarray(layer.fusion_weights).tobytes() + repr(calibration.fusion).encode())
    return calibration, digest.hexdigest()[:16]


def _arms(methods: tuple[str, ...], budgets: list[int]) -> "list[Arm]":
    from velox_cache.harness.arms import parse_arm

    return [parse_arm(method, budget) for method in methods for budget in budgets]


def _listed(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())


def _count(option: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{option} takes whole numbers such as 128,256, got {text!r}")
    return int(text)

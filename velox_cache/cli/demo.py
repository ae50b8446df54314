"""Fetch a small model, calibrate its Q-Filters, and run it under several caches side by side.

Nothing is staged: a model this small may well lose the planted fact in a small cache, and the table says so.
"""

import argparse
import os
import platform
import sys
import time

EXAMPLES = """examples:
  velox demo
  velox demo --budgets 1024,256
  velox demo --model mlx-community/Llama-3.2-1B-Instruct-4bit"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox demo`."""
    parser.add_argument(
        "--model", default="smollm2-135m", metavar="MODEL", help="another model: folder, name or repository"
    )
    parser.add_argument(
        "--budgets", type=_budgets, default=(512, 256), metavar="N,N", help="rows to keep (default: 512,256)"
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=3072, metavar="N", help="tokens to calibrate on (default: 3072)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Fetch, calibrate, compare, print."""
    from rich.console import Console

    from velox_cache import calibrate, save_qfilters
    from velox_cache.calibration.texts import SOURCE, calibration_texts
    from velox_cache.cli.model_argument import load_model, model_id
    from velox_cache.cli.progress import progress_bar
    from velox_cache.evaluation import Arm
    from velox_cache.evaluation.demo import (
        Workload,
        compare_arms,
        default_arms,
        demo_prompt,
        results_table,
        tokens_per_arm,
    )
    from velox_cache.models import SOURCES, default_cache_dir, fetch_model

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    began = time.perf_counter()
    model_path = str(fetch_model(arguments.model)) if arguments.model in SOURCES else arguments.model
    model, tokenizer = load_model(model_path)
    name = model_id(model_path)
    console.print(f"[bold]{name}[/bold], {platform.machine()}, {os.cpu_count()} CPU cores")

    at = time.perf_counter()
    calibration = calibrate(
        model,
        tokenizer,
        calibration_texts(),
        max_tokens=arguments.calibration_tokens,
        model_id=name,
        dataset=SOURCE,
        progress=sys.stderr.isatty(),
    )
    filters = default_cache_dir().parent / "filters" / f"{name.replace('/', '--')}.npz"
    filters.parent.mkdir(parents=True, exist_ok=True)
    save_qfilters(calibration, filters)
    console.print(
        f"calibrated on {calibration.n_tokens:,} tokens of {SOURCE} in {time.perf_counter() - at:.0f} s: {filters}",
        soft_wrap=True,
    )

    workload, arms = Workload(), default_arms(arguments.budgets)
    with progress_bar() as bar:
        task = bar.add_task("", total=len(arms) * tokens_per_arm(tokenizer, workload))

        def advance(arm: Arm, n_tokens: int) -> None:
            bar.update(task, description=arm.label, advance=n_tokens)

        results = compare_arms(model, tokenizer, calibration, arms, workload, advance)
    console.print(results_table(results))
    console.print(
        f"Long prompt: {len(demo_prompt(tokenizer, workload)):,} tokens of {SOURCE}, the fact after the first tenth; "
        f"{workload.n_answer} tokens decoded greedily. Perplexity and next token: {workload.n_scored} held-out tokens, "
        f"one by one, after {workload.n_context:,} others. Each method always keeps the first 4 rows and the latest "
        f"three quarters, or as many as its row says. Caches ran one after another, so tok/s moves with the machine. "
        f"Total {time.perf_counter() - began:.0f} s."
    )
    return 0


def _budgets(text: str) -> tuple[int, ...]:
    try:
        budgets = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, such as 512,256") from None
    return budgets

"""Fetch a small model, calibrate it, and run it under several caches side by side.

A small model may lose the planted fact in a small cache. The table then says so.
"""

import argparse
import os
import platform
import time
from dataclasses import replace
from functools import partial

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
        "--calibration-tokens", type=int, default=2048, metavar="N", help="tokens to calibrate on (default: 2048)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Fetch, calibrate, compare, print."""
    from rich.console import Console

    from velox_cache import calibrate, save_calibration
    from velox_cache.calibration.made_once import calibration_file
    from velox_cache.calibration.passages import work_of_losses
    from velox_cache.calibration.predicted_attention import predicts_attention
    from velox_cache.calibration.texts import SOURCE, calibration_texts
    from velox_cache.cli.model_argument import load_model, model_id
    from velox_cache.evaluation.demo import Workload, compare_arms, comparison_work, default_arms, results_table
    from velox_cache.models import SOURCES, fetch_model
    from velox_cache.progress import told_progress
    from velox_cache.slow_blas import slow_blas_advice

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    began = time.perf_counter()
    model_path = str(fetch_model(arguments.model)) if arguments.model in SOURCES else arguments.model
    model, tokenizer = load_model(model_path)
    name = model_id(model_path)
    console.print(f"[bold]{name}[/bold], {platform.machine()}, {os.cpu_count()} CPU cores")
    if (advice := slow_blas_advice()) is not None:
        console.print(advice)

    workload, arms = Workload(), default_arms(arguments.budgets)
    file = calibration_file(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    calibrating = arguments.calibration_tokens + work_of_losses(arguments.calibration_tokens)
    with told_progress(calibrating + comparison_work(tokenizer, workload)) as report:
        calibration = calibrate(
            model,
            tokenizer,
            calibration_texts(),
            max_tokens=arguments.calibration_tokens,
            prefill_step_size=128,  # for progress to be seen
            model_id=name,
            dataset=SOURCE,
            progress=False,
            losses=True,
            advance=partial(report, "calibrating"),
        )
        save_calibration(replace(calibration, predicts=predicts_attention(model, tokenizer, calibration)), file)
        results = compare_arms(model, tokenizer, calibration, arms, workload, report)
    console.print(results_table(results))
    console.print(
        f"Rows and MiB: after a prompt of {results[0].answer.prompt_tokens:,} tokens of {SOURCE}, the fact after the "
        f"first tenth, at most {workload.n_answer} tokens answered. Perplexity and next token: {workload.n_scored} "
        f"held-out tokens, one by one, after {workload.n_context:,} others. The first 4 rows and the latest three "
        f'quarters are always kept. What is not kept is gone: "lost" is what a cache of that size, and a model of '
        f"this, does to a fact long ago. Calibrated on {calibration.n_tokens:,} tokens. "
        f"Total {time.perf_counter() - began:.0f} s."
    )
    console.print("\n".join(next_steps(arguments.model, max(arguments.budgets))), soft_wrap=True)
    return 0


def next_steps(model: str, budget: int) -> list[str]:
    """What to type next: text from the recommended cache, all methods on one's own model, and the same in Python."""
    return [
        f'velox generate {model} --budget {budget} --prompt "Why is the sky blue?"',
        f"velox compare {model} --budgets {budget}    # measured at length, task by task",
        f"install(model, tokenizer=tokenizer, budget={budget})    # in Python: README",
    ]


def _budgets(text: str) -> tuple[int, ...]:
    try:
        budgets = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, such as 512,256") from None
    return budgets

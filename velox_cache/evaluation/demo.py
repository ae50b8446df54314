"""One model under several caches, side by side: what each keeps, costs and loses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.table import Table

from velox_cache.calibration.artifact import QFiltersCalibration
from velox_cache.calibration.texts import filler_text, held_out_text
from velox_cache.evaluation import (
    FULL,
    Answer,
    Arm,
    Fidelity,
    PlantedFact,
    Reading,
    greedy_answer,
    planted_fact_prompt,
    read_passage,
)
from velox_cache.harness.fidelity import fidelity
from velox_cache.harness.perplexity import perplexity
from velox_cache.installation.installing import install, uninstall
from velox_cache.installation.layer_arguments import calibration_for
from velox_cache.known_methods import method_named

PLANTED = PlantedFact(
    "The secret code word of the lighthouse is marigold.",
    "What is the secret code word of the lighthouse?",
    "marigold",
)
LABELS = {"fusion": "Fusion", "qfilters": "Q-Filters", "streaming_llm": "StreamingLLM"}
"""The methods that the demo shows."""


@dataclass(frozen=True)
class Workload:
    """What every arm reads. Lengths in tokens."""

    n_filler: int = 1500  # of the long prompt, in which the fact is planted after a tenth
    n_answer: int = 48  # decoded after it
    n_context: int = 1024  # of the held-out passage, read before
    n_scored: int = 192  # of the held-out passage, predicted one by one


@dataclass(frozen=True)
class ArmResult:
    """What came of one arm."""

    arm: Arm
    answer: Answer
    found: bool  # whether the answer holds the planted fact
    perplexity: float
    fidelity: Fidelity  # with the full cache


def default_arms(budgets: Sequence[int]) -> list[Arm]:
    """The full cache, each method of LABELS at each budget, and fusion with fewer recent rows, which finds facts."""
    most = max(budgets)
    long_ago = Arm(f"Fusion, {most}, a quarter recent", "fusion", {"budget": most, "recent": most // 4})
    bounded = [Arm(f"{label}, {n}", method, {"budget": n}) for method, label in LABELS.items() for n in budgets]
    return [FULL, long_ago, *bounded]


def compare_arms(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    calibration: QFiltersCalibration,
    arms: Sequence[Arm],
    workload: Workload = Workload(),
    advance: Callable[[Arm, int], object] = lambda arm, n_tokens: None,
) -> list[ArmResult]:
    """Run every arm, the first of which is the full cache; the model ends up with its own caches.

    `advance` is called with the arm at work and the tokens done; `tokens_per_arm` says how many there will be.
    Raises ValueError when the first arm is not the full cache, or an arm's settings cannot work.
    """
    if not arms or arms[0].method is not None:
        raise ValueError("the first arm must be the full cache, which the others are compared with")
    prompt = demo_prompt(tokenizer, workload)
    passage = list(tokenizer.encode(held_out_text()))[: workload.n_context + workload.n_scored]
    results: list[ArmResult] = []
    reference: Reading | None = None
    for arm in arms:

        def step(n_tokens: int, arm: Arm = arm) -> None:
            advance(arm, n_tokens)

        uninstall(model)
        if arm.method is not None:
            filters = calibration_for(method_named(arm.method), calibration if arm.calibrated else None)
            install(model, arm.method, filters=filters, **arm.settings)
        try:
            answer = greedy_answer(model, tokenizer, prompt, n_tokens=workload.n_answer, advance=step)
            reading = read_passage(model, passage, n_context=workload.n_context, advance=step)
        finally:
            uninstall(model)
        reference = reference or reading
        found = PLANTED.is_answered_by(answer.text)
        results.append(ArmResult(arm, answer, found, perplexity(reading), fidelity(reading, reference)))
    return results


def demo_prompt(tokenizer: TokenizerWrapper, workload: Workload) -> list[int]:
    """The long prompt."""
    return planted_fact_prompt(tokenizer, PLANTED, filler_text(), n_filler=workload.n_filler)


def tokens_per_arm(tokenizer: TokenizerWrapper, workload: Workload) -> int:
    """How many tokens `compare_arms` reports for each arm."""
    return len(demo_prompt(tokenizer, workload)) + workload.n_answer + workload.n_context + workload.n_scored - 1


def results_table(results: Sequence[ArmResult]) -> Table:
    """A rich table with a row for each arm."""
    table = Table()
    table.add_column("cache")
    for heading in ("rows kept", "KV MiB", "compression", "tok/s", "perplexity", "same next token"):
        table.add_column(heading, justify="right")
    table.add_column("answer (planted: marigold)", min_width=24)
    for result in results:
        usage = result.answer.usage
        table.add_row(
            result.arm.label,
            f"{usage.rows_kept:,}",
            f"{usage.kept_bytes / 2**20:.1f}",
            f"{usage.compression:.1f}x",
            f"{result.answer.tokens_per_second:.1f}",
            f"{result.perplexity:.2f}",
            f"{result.fidelity.agreement:.1%}",
            f"{'found' if result.found else 'lost'}: {' '.join(result.answer.text.split())}",
        )
    return table

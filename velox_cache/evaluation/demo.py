"""One model under several caches, side by side: what each keeps, costs and loses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.table import Table

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.texts import filler_text, held_out_text
from velox_cache.evaluation.prompt import TaskPrompt, inserted, make_prompt
from velox_cache.evaluation.task_runs import TaskReply, run_task
from velox_cache.harness.arm_readings import ArmReading, read_arms
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.recommended import AUTO

FACT = "The secret code word of the lighthouse is marigold."
QUESTION = "What is the secret code word of the lighthouse?"
ANSWER = "marigold"
LABELS = {"fusion": "Fusion", "streaming_llm": "StreamingLLM"}
"""The methods that the demo shows: the recommended one, and the simplest."""

DECODED = 30
"""Work of decoding a token under all caches, in tokens of a prefill: about what it takes a CPU."""

Advance = Callable[[str, int], object]
"""(what is being done, work done since the last call)"""


@dataclass(frozen=True)
class Workload:
    """What every arm reads. Lengths in tokens."""

    n_filler: int = 1200  # of the long prompt, in which the fact is planted after a tenth
    n_answer: int = 24  # most, decoded after it
    n_context: int = 768  # of the held-out passage, read before
    n_scored: int = 128  # of the held-out passage, predicted one by one


@dataclass(frozen=True)
class ArmResult:
    """What came of one arm."""

    arm: Arm
    answer: TaskReply
    reading: ArmReading  # its fidelity is with the full cache

    @property
    def found(self) -> bool:
        """Whether the answer holds the planted fact."""
        return self.answer.score == 1


def default_arms(budgets: Sequence[int]) -> list[Arm]:
    """The full cache, and each method of LABELS at each budget, as `install` makes it."""
    methods = [(n, method, label) for n in budgets for method, label in LABELS.items()]
    return [FULL, *(Arm(f"{label}, {n}", method, {"budget": n, "shares": AUTO}) for n, method, label in methods)]


def compare_arms(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    calibration: Calibration,
    arms: Sequence[Arm],
    workload: Workload = Workload(),
    advance: Advance = lambda what, work: None,
) -> list[ArmResult]:
    """Run all arms at once, the first of which is the full cache; the model ends up with its own caches.

    Prompt and passage are prefilled once, for all; `advance` is called as they proceed, up to `comparison_work`. Raises
    ValueError when the first arm is not the full cache, or an arm's settings cannot work.
    """
    if not arms or arms[0].method is not None:
        raise ValueError("the first arm must be the full cache, which the others are compared with")
    makers = [cache_maker(model, arm, calibration) for arm in arms]
    prompt = demo_prompt(tokenizer, workload)
    n_prompt, n_caches = len(make_prompt(tokenizer, prompt).tokens), f"{len(arms)} caches side by side"
    answering = _weighed(advance, n_prompt - 1, "reading a long prompt", f"answering from {n_caches}")
    answers = run_task(model, tokenizer, prompt, arms, makers, n_reply=workload.n_answer, advance=answering)
    passage = list(tokenizer.encode(held_out_text()))[: workload.n_context + workload.n_scored]
    predicting = _weighed(advance, workload.n_context - 1, "reading a passage", f"predicting it from {n_caches}")
    readings = read_arms(model, passage, makers, n_context=workload.n_context, advance=predicting)
    return [ArmResult(*found) for found in zip(arms, answers, readings, strict=True)]


def demo_prompt(tokenizer: TokenizerWrapper, workload: Workload) -> TaskPrompt:
    """The long prompt."""
    filler = tokenizer.decode(list(tokenizer.encode(filler_text()))[: workload.n_filler])
    text = f"{inserted(filler, [FACT], [0.1])}\n\n{QUESTION}"
    return TaskPrompt(text, reply_start="", answers=(ANSWER,), evidence=(FACT,))


def comparison_work(tokenizer: TokenizerWrapper, workload: Workload) -> int:
    """How much work `compare_arms` reports, in tokens of a prefill."""
    n_prompt = len(make_prompt(tokenizer, demo_prompt(tokenizer, workload)).tokens)
    return n_prompt - 1 + workload.n_context - 1 + DECODED * (workload.n_answer + workload.n_scored)


def results_table(results: Sequence[ArmResult]) -> Table:
    """A rich table with a row for each arm."""
    table = Table()
    table.add_column("cache")
    for heading in ("rows kept", "KV MiB", "smaller", "perplexity", "same next token", "fact's rows kept"):
        table.add_column(heading, justify="right")
    table.add_column(f"answer (planted: {ANSWER})", min_width=24)
    for result in results:
        usage = result.answer.usage
        table.add_row(
            result.arm.label,
            f"{usage.rows_kept:,}",
            f"{usage.kept_bytes / 2**20:.1f}",
            f"{usage.compression:.1f}x",
            f"{result.reading.perplexity:.2f}",
            f"{result.reading.fidelity.agreement:.1%}",
            f"{result.answer.evidence_kept:.0%}",
            f"{'found' if result.found else 'lost'}: {' '.join(result.answer.reply.split())}",
        )
    return table


def _weighed(advance: Advance, n_prefill: int, reading: str, decoding: str) -> Callable[[int], None]:
    """What takes tokens done, the first `n_prefill` of which are prefilled and the others decoded, and reports work."""
    left = n_prefill
    advance(reading, 0)

    def report(n_tokens: int) -> None:
        nonlocal left
        read = min(n_tokens, left)
        left -= read
        advance(reading if left else decoding, read + DECODED * (n_tokens - read))

    return report

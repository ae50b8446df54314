"""What `velox compare` measures, as values for `compare`: contexts with later questions, and long traces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.evaluation.compare import Advance, Contender, Measurement
from velox_cache.evaluation.context_runs import ReadContext, run_aware, run_context
from velox_cache.evaluation.contexts import Context, make_context
from velox_cache.evaluation.questions import TASKS
from velox_cache.evaluation.text_kinds import KINDS
from velox_cache.evaluation.traces import TRACES, make_trace, run_trace
from velox_cache.harness.texts import text_digest


@dataclass(frozen=True)
class Workload:
    """What every arm goes through. Lengths in tokens."""

    half: str = "report"  # of texts and seeds
    kinds: Sequence[str] = tuple(KINDS)
    n_contexts: int = 2  # of each kind
    length: int = 2048  # of a context
    n_continuation: int = 64  # of the natural text, predicted after it
    tasks: Sequence[str] = tuple(TASKS)
    block: int = 256  # of the prefill; 0: one
    aware: bool = False  # ask also with the question in sight of the last eviction
    n_traces: int = 0  # of each kind of trace
    trace_length: int = 2000
    n_free: int = 200  # generated freely after a trace


def contexts(model: nn.Module, tokenizer: TokenizerWrapper, work: Workload, rows: Path) -> list[Measurement]:
    """Fidelity and answers after each context. rows: the folder for this model's rows."""
    found = []
    for number in range(work.n_contexts):  # kinds take turns, so that a run that is cut short has all of them
        for kind in work.kinds:
            context = make_context(
                tokenizer,
                kind,
                work.half,
                number,
                length=work.length,
                n_continuation=work.n_continuation,
                tasks=work.tasks,
            )
            found += _of_context(model, tokenizer, work, context, rows)
    return found


def traces(model: nn.Module, tokenizer: TokenizerWrapper, work: Workload) -> list[Measurement]:
    """Fidelity along long chains of steps, and loops in what is generated after them."""
    found = []
    for number in range(work.n_traces):
        for kind in TRACES:
            tokens = make_trace(tokenizer, kind, work.half, number, work.trace_length)

            def run(contenders: Sequence[Contender], advance: Advance, tokens: list[int] = tokens) -> list[Any]:
                return run_trace(model, tokens, contenders, n_free=work.n_free, advance=advance)

            sizes = {"half": work.half, "tokens": text_digest(repr(tokens)), "n_free": work.n_free}
            n_tokens = work.trace_length + work.n_free
            found.append(Measurement("trace", kind, number, sizes, n_tokens, run, compares=True))
    return found


def _of_context(
    model: nn.Module, tokenizer: TokenizerWrapper, work: Workload, context: Context, rows: Path
) -> list[Measurement]:
    n_asked = sum(len(question.tokens) for question in context.questions)
    sizes = {"half": work.half, "context": text_digest(repr(context)), "block": work.block}
    n_tokens = 2 * len(context.tokens) + n_asked + work.n_continuation

    def read(advance: Advance) -> ReadContext:
        return ReadContext(model, tokenizer, context, rows, block=work.block, advance=advance)

    def measured(run: Callable[[ReadContext, Sequence[Contender], Advance], list[dict[str, Any]]]) -> Any:
        return lambda contenders, advance: run(read(advance), contenders, advance)

    found = [
        Measurement("context", context.kind, context.number, sizes, n_tokens, measured(run_context), compares=True)
    ]
    if work.aware:
        found.append(Measurement("aware", context.kind, context.number, sizes, n_tokens, measured(run_aware)))
    return found

"""What `velox compare` measures: reading, tasks, and what heads attend to and keep, as values for `compare`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.texts import calibration_texts, filler_text
from velox_cache.evaluation.anisotropy import anisotropy
from velox_cache.evaluation.attention import default_scorers, score_attention
from velox_cache.evaluation.compare import Advance, Contender, Measurement
from velox_cache.evaluation.task_runs import run_task, seeded_prompt
from velox_cache.evaluation.tasks import TASKS
from velox_cache.harness.arm_readings import read_arms
from velox_cache.harness.arms import Arm
from velox_cache.harness.memory import CacheUsage
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.harness.texts import passages, text_digest, text_named
from velox_cache.introspection.query_tap import flat_caches
from velox_fn.engine.eviction import kept_positions


@dataclass(frozen=True)
class Workload:
    """What every arm goes through. Lengths in tokens."""

    texts: Sequence[str] = ("documentation", "licence", "code")
    n_context: int = 1536  # of a passage, read before
    n_scored: int = 96  # of a passage, predicted one by one
    n_passages: int = 2  # of each text
    tasks: Sequence[str] = tuple(TASKS)
    n_filler: int = 1024  # of a task's text
    n_seeds: int = 5  # prompts of each task
    n_reply: int = 20  # most tokens of a reply
    n_heads_text: int = 512  # of the first text, on which heads are looked at


def reading(model: nn.Module, tokenizer: TokenizerWrapper, work: Workload) -> list[Measurement]:
    """Perplexity and fidelity on passages of each text, token by token."""
    found = []
    for name in work.texts:
        text = text_named(name)
        cut = passages(list(tokenizer.encode(text)), work.n_context + work.n_scored, work.n_passages)
        sizes = {"text": text_digest(text), "n_context": work.n_context, "n_scored": work.n_scored}
        for seed, passage in enumerate(cut):

            def read(contenders: Sequence[Contender], advance: Advance, passage: list[int] = passage) -> list[Any]:
                makers = [one.make for one in contenders]
                readings = read_arms(model, passage, makers, n_context=work.n_context, advance=advance)
                for one, usage in zip(contenders, (one.usage for one in readings), strict=True):
                    _check_rows(one, usage)
                return [
                    {
                        "perplexity": one.perplexity,
                        "mean_loss": float(one.losses.mean(dtype=np.float64)),
                        **dataclasses.asdict(one.fidelity),
                        **_usage(one.usage),
                    }
                    for one in readings
                ]

            of = {**sizes, "n_passages": work.n_passages}
            found.append(Measurement("perplexity", name, seed, of, len(passage), read, compares=True))
    return found


def tasks(model: nn.Module, tokenizer: TokenizerWrapper, work: Workload) -> list[Measurement]:
    """Replies to each task's prompts. Raises ValueError for an unknown task."""
    filler = filler_text()
    sizes = {"text": text_digest(filler), "n_filler": work.n_filler, "n_reply": work.n_reply}
    found = []
    for name in work.tasks:
        if name not in TASKS:
            raise ValueError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}")
        for seed in range(work.n_seeds):

            def ask(
                contenders: Sequence[Contender], advance: Advance, name: str = name, seed: int = seed
            ) -> list[dict[str, Any]]:
                prompt = seeded_prompt(tokenizer, TASKS[name], filler, n_filler=work.n_filler, seed=seed)
                arms, makers = [one.arm for one in contenders], [one.make for one in contenders]
                replies = run_task(model, tokenizer, prompt, arms, makers, n_reply=work.n_reply, advance=advance)
                return [
                    {
                        "score": one.score,
                        "floor": prompt.floor,
                        "evidence_kept": one.evidence_kept,
                        "prompt_tokens": one.prompt_tokens,
                        "reply": one.reply,
                        "answers": list(prompt.answers),
                        **_usage(one.usage),
                    }
                    for one in replies
                ]

            found.append(Measurement("task", name, seed, sizes, work.n_filler + work.n_reply, ask))
    return found


def heads(
    model: nn.Module, tokenizer: TokenizerWrapper, calibration: Calibration, work: Workload, shown_budget: int
) -> list[Measurement]:
    """On the first text: correlation of scores with attention, anisotropy, and the positions that arms keep."""
    name, n_tokens = work.texts[0], work.n_heads_text
    text = text_named(name)
    tokens = list(tokenizer.encode(text))[:n_tokens]
    sizes = {"text": text_digest(text), "n_tokens": n_tokens}

    def correlations(contenders: Sequence[Contender], advance: Advance) -> list[dict[str, Any]]:
        found = score_attention(model, tokenizer, text, default_scorers(calibration), n_tokens=n_tokens)
        return [
            {
                one.scorer: {"mean": one.mean, "sign_correct": one.sign_correct, "per_head": _rounded(one.per_head)}
                for one in found
            }
        ]

    def drift(contenders: Sequence[Contender], advance: Advance) -> list[dict[str, Any]]:
        fitted = list(tokenizer.encode("\n".join(calibration_texts())))[: 2 * n_tokens]
        found = anisotropy(model, fitted, tokens)
        per_head = {one.name: _rounded(getattr(found, one.name)) for one in dataclasses.fields(found)}
        return [{"positive_share": found.positive_share, **per_head}]

    def kept(contenders: Sequence[Contender], advance: Advance) -> list[dict[str, Any]]:
        prefill = shared_prefill(model, tokens)
        return [{"kept_share": kept_map(prefill.into(one.make()), n_tokens)} for one in contenders]

    def is_full(arm: Arm) -> bool:
        return arm.method is None

    return [
        Measurement("attention", name, 0, sizes, n_tokens, correlations, is_full),
        Measurement("anisotropy", name, 0, sizes, 3 * n_tokens, drift, is_full),
        Measurement("kept", name, 0, sizes, n_tokens, kept, lambda arm: arm.budget == shown_budget),
    ]


def kept_map(prompt_cache: Sequence[Any], n_tokens: int) -> list[list[float]]:
    """For each bounded layer, the share of heads that keep each of the first `n_tokens` positions."""
    shares = []
    for cache in flat_caches(prompt_cache):
        if isinstance(cache, EvictingKVCache) and cache.record is not None:
            positions = np.array(kept_positions(cache.record)[0])
            shares.append(np.mean([np.isin(np.arange(n_tokens), head) for head in positions], axis=0).round(3).tolist())
    return shares


def _check_rows(contender: Contender, usage: CacheUsage) -> None:
    budget = contender.settings.get("budget")
    if budget is not None and usage.rows_kept != min(budget, usage.tokens_seen):
        raise ValueError(
            f"{contender.arm.label} keeps {usage.rows_kept} of {usage.tokens_seen} rows at budget {budget}: its "
            "numbers would not be those of its budget"
        )


def _rounded(values: np.ndarray[Any, Any]) -> Any:
    return values.round(5).tolist()  # for files of a readable size


def _usage(usage: CacheUsage) -> dict[str, Any]:
    return {**dataclasses.asdict(usage), "compression": usage.compression}

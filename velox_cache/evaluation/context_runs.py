"""A context under many caches: it is read and evicted first, what continues it or asks about it comes later.

The model reads each context once; its rows and queries go to disk, and every cache is made from them. What follows goes
into forks of it: caches never change in place, so a fork costs nothing and disturbs no other.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.caches.digest import digest
from velox_cache.evaluation.ceilings import CEILINGS, Scores, caches_by_scores
from velox_cache.evaluation.compare import Contender
from velox_cache.evaluation.contexts import AskedQuestion, Context
from velox_cache.evaluation.task_runs import check_equal_rows
from velox_cache.harness.fidelity import token_fidelity
from velox_cache.harness.shared_prefill import SharedPrefill, shared_prefill
from velox_cache.harness.side_by_side import side_by_side

PromptCache = list[Any]
Advance = Callable[[int], object]


class ReadContext:
    """A context that the model has read, with its rows on disk and its ceilings, each computed when first asked for."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        context: Context,
        folder: Path,
        *,
        block: int = 256,
        advance: Advance = lambda n_tokens: None,
    ) -> None:
        """folder: where rows of this model are kept; they are found there again by the context's tokens. block: of the
        prefill, 0 for one; caches evict after each."""
        self.model, self.tokenizer, self.context, self.block = model, tokenizer, context, block
        name = hashlib.sha256(repr((context.tokens, block)).encode()).hexdigest()[:20]
        self.rows = rows_on_disk(model, context.tokens, folder / name, block, advance)
        self._scores: dict[str, Scores] = {}

    def caches(self, contender: Contender, *, stop: int | None = None) -> PromptCache:
        """The caches of an arm after the first `stop` tokens of the context (None: all), evicted in blocks."""
        method, settings = contender.arm.method, contender.arm.settings
        if method is not None and method in CEILINGS:
            if method not in self._scores:
                self._scores[method] = CEILINGS[method](self.model, self.tokenizer, self.context, self.rows)
            fresh = caches_by_scores(self.model, self._scores[method], **settings)
        else:
            fresh = contender.make()
        return self.rows.into(fresh, stop=stop, block=self.block)

    def caches_that_saw(self, question: AskedQuestion, before: Sequence[PromptCache]) -> list[PromptCache]:
        """Caches that evict after the last block and the question, which they see before they choose.

        before: the same arms' caches when all but the last block of the context had come; they stay as they are.
        """
        asked = self.rows.extended(self.model, question.tokens[:-1])
        return [asked.into(forked(cache), start=self.last_block) for cache in before]

    @property
    def last_block(self) -> int:
        """Tokens before the last block."""
        return (len(self.context.tokens) - 1) // self.block * self.block if self.block else 0


def rows_on_disk(
    model: nn.Module, tokens: Sequence[int], folder: Path, block: int, advance: Advance = lambda n_tokens: None
) -> SharedPrefill:
    """The rows of these tokens, from `folder` where they are, else read and written there."""
    if folder.is_dir():
        advance(len(tokens))
    else:
        shared_prefill(model, tokens, block=block, advance=advance).save(folder)
    return SharedPrefill.load(folder)


def model_digest(model: nn.Module) -> str:
    """A name for the weights: what rows on disk belong to."""
    named: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()), key=lambda item: item[0])  # type: ignore[arg-type]
    header = repr([(name, array.shape, str(array.dtype)) for name, array in named])
    return hashlib.sha256(np.array(digest(header, [array for _, array in named])).tobytes()).hexdigest()[:16]


def forked(prompt_cache: Sequence[Any]) -> PromptCache:
    """Caches that go on from where `prompt_cache` stands, which stays as it is."""
    return [copy.deepcopy(cache) for cache in prompt_cache]


def continued(
    model: nn.Module, caches: Sequence[PromptCache], tokens: Sequence[int], advance: Advance = lambda n_tokens: None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """KL divergence from the first cache's predictions, and whether the likeliest token is the same: [A, len - 1] each.

    The caches, which go on, get `tokens` one by one. The prediction after each of them but the last counts.
    """
    divergences, same = [], []
    with side_by_side(model, caches) as step:
        for token in tokens[:-1]:
            logits = step([token] * len(caches))
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            equal, divergence = token_fidelity(logprobs, logprobs[:1])
            divergences.append(divergence)
            same.append(equal)
            advance(1)
    return np.stack(divergences, axis=1), np.stack(same, axis=1)


def answered(
    model: nn.Module, caches: Sequence[PromptCache], asked: Sequence[int], answers: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """For each cache: the log-probability of each answer after `asked`, and whether the greedy reply is the first.

    The caches stay as they are: each answer goes into a fork. Answers have one length.
    """
    after = [forked(cache) for cache in caches]
    with side_by_side(model, after) as step:
        first = step([list(asked)] * len(after))[:, -1:]
    logits = mx.repeat(first, len(answers), axis=0)
    if len(answers[0]) > 1:
        branches = [forked(cache) for cache in after for _ in answers]
        with side_by_side(model, branches) as step:
            rest = step([list(answer[:-1]) for _ in after for answer in answers])
        logits = mx.concatenate([logits, rest], axis=1)
    targets = mx.array([list(answer) for _ in after for answer in answers])
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    scores = mx.take_along_axis(logprobs, targets[..., None], axis=-1).sum(axis=(1, 2))
    greedy = (logits.argmax(-1) == targets).all(axis=-1)
    by_cache = np.array(scores).reshape(len(caches), -1), np.array(greedy).reshape(len(caches), -1)
    return [{"logprobs": own.round(4).tolist(), "greedy": bool(said[0])} for own, said in zip(*by_cache, strict=True)]


def run_context(read: ReadContext, contenders: Sequence[Contender], advance: Advance) -> list[dict[str, Any]]:
    """Each arm's fidelity on the continuation, and its answers to questions that come after it evicted.

    Raises ValueError when arms of one budget keep different numbers of rows.
    """
    context = read.context
    caches = [read.caches(one) for one in contenders]
    check_equal_rows([one.arm for one in contenders], caches)
    advance(len(context.tokens))
    values: list[dict[str, Any]] = [{"rows": len(context.tokens), "answers": []} for _ in contenders]
    for question in context.questions:
        for own, found in zip(values, answered(read.model, caches, question.tokens, question.answers), strict=True):
            own["answers"].append({"task": question.task, **found})
        advance(len(question.tokens))
    divergences, same = continued(read.model, [forked(cache) for cache in caches], context.continuation, advance)
    for own, divergence, equal in zip(values, divergences, same, strict=True):
        own |= {"kl_divergence": float(divergence.mean(dtype=np.float64)), "agreement": float(equal.mean())}
    return values


def run_aware(read: ReadContext, contenders: Sequence[Contender], advance: Advance) -> list[dict[str, Any]]:
    """Each arm's answers when it sees the question before it evicts the last block."""
    before = [read.caches(one, stop=read.last_block) for one in contenders]
    advance(len(read.context.tokens))
    values: list[dict[str, Any]] = [{"answers": []} for _ in contenders]
    for question in read.context.questions:
        caches = read.caches_that_saw(question, before)
        found = answered(read.model, caches, question.tokens[-1:], question.answers)
        for own, one in zip(values, found, strict=True):
            own["answers"].append({"task": question.task, **one})
        advance(len(question.tokens))
    return values


def answers_of(values: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """A cell's answers to the questions of one task."""
    return [answer for answer in values["answers"] if answer["task"] == task]


def margin(logprobs: Sequence[float]) -> float:
    """Nats by which the right answer, which stands first, is likelier than the likeliest wrong one."""
    return logprobs[0] - max(logprobs[1:])

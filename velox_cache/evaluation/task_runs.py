"""One prompt under many caches: the replies, and that all hold as many rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.evaluation.prompt import TaskPrompt, make_prompt, score_reply
from velox_cache.harness.arms import Arm, MakeCache
from velox_cache.harness.memory import CacheUsage, cache_usage
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.harness.side_by_side import side_by_side
from velox_cache.introspection.query_tap import row_caches
from velox_fn.engine.eviction import kept_positions


@dataclass(frozen=True)
class TaskReply:
    """What the model replied from one cache."""

    reply: str
    score: float  # share of the answers found, 0 to 1
    evidence_kept: float  # share of the evidence's rows kept after the prompt, over bounded layers and heads
    prompt_tokens: int
    usage: CacheUsage  # after the prompt


def run_task(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: TaskPrompt,
    arms: Sequence[Arm],
    makers: Sequence[MakeCache],
    *,
    n_reply: int = 16,
    block: int = 0,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> list[TaskReply]:
    """Greedy replies of at most `n_reply` tokens to one prompt, one for each arm and its maker of caches.

    The prompt but its last token is prefilled once, in blocks of `block` (0: one), after each of which the caches
    evict: with several they choose rows before they have seen the question, which stands last. The rest is decoded, all
    arms in one batch. A reply ends with the first token that ends a generation. `advance` is called with the tokens
    done. Raises ValueError when arms of one budget keep different numbers of rows, and for a negative block.
    """
    encoded = make_prompt(tokenizer, prompt)
    prefill = shared_prefill(model, encoded.tokens[:-1], block=block, advance=advance)
    caches = [prefill.into(make(), block=block) for make in makers]
    check_equal_rows(arms, caches)
    usages = [cache_usage(cache) for cache in caches]
    kept = [evidence_kept(cache, encoded.evidence) for cache in caches]
    found = np.array(_greedy(model, tokenizer, caches, encoded.tokens[-1], n_reply, advance))
    replies = [_until_end(tokenizer, row.tolist()) for row in found.T]
    return [
        TaskReply(reply, score_reply(prompt, reply), share, len(encoded.tokens), usage)
        for reply, share, usage in zip(replies, kept, usages, strict=True)
    ]


def check_equal_rows(arms: Sequence[Arm], prompt_caches: Sequence[Sequence[Any]]) -> None:
    """ValueError unless all arms have seen as many tokens, and each keeps its budget's rows: in the mean over the
    bounded layers and heads, each of which has its own budget's, or all that were seen.

    An arm that keeps more than the others would be compared on its memory, not on its choice. One whose budgets differ
    keeps fewer while some of its heads still have room.
    """
    found: dict[int | None, tuple[str, int]] = {}
    for arm, prompt_cache in zip(arms, prompt_caches, strict=True):
        bounded = [
            (cache, cache.record.store.ranks.shape[1])
            for cache in row_caches(prompt_cache)
            if isinstance(cache, EvictingKVCache) and cache.record is not None
        ]
        if not bounded:
            continue
        n_heads = sum(heads for _, heads in bounded)
        seen = sum(cache.tokens_seen * heads for cache, heads in bounded)
        kept = sum(cache.tokens_kept * heads for cache, heads in bounded)
        budgets = [(cache.method.settings["budget"], cache.tokens_seen, heads) for cache, heads in bounded]
        of_budgets = sum(min(budget, n_tokens) * heads for budget, n_tokens, heads in budgets)
        on_average = sum(budget * heads for budget, _, heads in budgets) / n_heads
        if arm.budget is not None and (on_average != arm.budget or kept != of_budgets):
            raise ValueError(
                f"{arm.label} keeps {kept} of {seen} rows in {n_heads} bounded heads at budget {arm.budget}: its "
                "numbers would not be those of its budget"
            )
        label, others_seen = found.setdefault(arm.budget, (arm.label, seen))
        if seen != others_seen:
            raise ValueError(
                f"{arm.label} has seen {seen} rows in {n_heads} bounded heads, {label} {others_seen}: compare arms "
                "after the same tokens only"
            )


def evidence_kept(prompt_cache: Sequence[Any], evidence: Sequence[tuple[int, int]]) -> float:
    """Share of the rows at the token ranges `evidence`, over all bounded layers and heads, that are kept.

    1 where nothing is bounded.
    """
    wanted = mx.array([position for start, stop in evidence for position in range(start, stop)])
    shares: list[mx.array] = []
    for cache in row_caches(prompt_cache):
        if isinstance(cache, EvictingKVCache) and cache.record is not None:
            positions = kept_positions(cache.record)
            shares.extend((positions[..., None] == wanted).any(axis=-2).mean(axis=(0, 2)))  # of each head
    return float(mx.stack(shares).mean()) if shares else 1.0


def _greedy(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    caches: Sequence[Sequence[Any]],
    last: int,
    n_reply: int,
    advance: Callable[[int], object],
) -> list[list[int]]:
    tokens = [last] * len(caches)
    found: list[list[int]] = []
    with side_by_side(model, caches) as step:
        while len(found) < n_reply:
            tokens = [int(token) for token in np.array(step(tokens).argmax(-1))]
            found.append(tokens)
            advance(1)
            if all(set(row) & tokenizer.eos_token_ids for row in zip(*found, strict=True)):
                advance(n_reply - len(found))
                break
    return found


def _until_end(tokenizer: TokenizerWrapper, tokens: list[int]) -> str:
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.eos_token_ids), len(tokens))
    return tokenizer.decode(tokens[:end]).strip()

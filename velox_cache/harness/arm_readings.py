"""A passage read token by token under many caches at once: perplexity, fidelity and memory of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.harness.arms import MakeCache
from velox_cache.harness.fidelity import Fidelity, token_fidelity
from velox_cache.harness.memory import CacheUsage, cache_usage
from velox_cache.harness.perplexity import perplexity_of, token_losses
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.harness.side_by_side import side_by_side
from velox_cache.harness.unreached import warn_where_nothing_leaves


@dataclass(frozen=True, eq=False)
class ArmReading:
    """The results of one cache on the passage."""

    losses: np.ndarray[Any, Any]  # float32 [N], negative log-likelihood of each token of the passage
    fidelity: Fidelity  # with the first cache of the call
    usage: CacheUsage  # after the passage

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.losses)


def read_arms(
    model: nn.Module,
    tokens: Sequence[int],
    makers: Sequence[MakeCache],
    *,
    n_context: int,
    block: int = 0,
    dtype: mx.Dtype | None = None,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> list[ArmReading]:
    """Read `tokens` under the caches of each maker, and score all tokens after the first `n_context`.

    The context is prefilled once, in blocks of `block` (0: one), after each of which the caches evict; the passage goes
    in one by one, all caches in one batch. The first maker's cache, which should be the full one, is the reference of
    fidelity. `advance` is called with the tokens done. dtype: that rows are stored in, while the model computes in its
    own; None is the model's.
    Warns where no cache but the first evicted anything.
    Equal to `read_passage(..., block_size=1, prefill_step_size=n_context)` for each cache, but for rounding.

    Raises ValueError unless 2 <= n_context < len(tokens), for a negative block, and when the caches disagree about the
    tokens seen.
    """
    if not 2 <= n_context < len(tokens):
        raise ValueError(
            f"n_context must be at least 2 and leave tokens to predict, got {n_context} for {len(tokens)} tokens"
        )
    prefill = shared_prefill(model, tokens[: n_context - 1], block=block, advance=advance)
    prefill = prefill if dtype is None else prefill.in_dtype(dtype)
    caches = [prefill.into(make(), block=block) for make in makers]
    losses, same, divergences = [], [], []
    with side_by_side(model, caches) as step:
        for token, target in zip(tokens[n_context - 1 :], tokens[n_context:], strict=False):
            logits = step([token] * len(makers))
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            losses.append(token_losses(logprobs, mx.full((len(makers),), target, mx.int32)))
            equal, divergence = token_fidelity(logprobs, logprobs[:1])
            same.append(equal)
            divergences.append(divergence)
            advance(1)
    bounded = [cache_usage(cache) for cache in caches[1:]]
    warn_where_nothing_leaves([usage.rows_kept for usage in bounded], len(tokens) - 1)
    agreements, means = (np.stack(part, axis=1).mean(axis=1, dtype=np.float64) for part in (same, divergences))
    return [
        ArmReading(own, Fidelity(float(agreement), float(divergence)), cache_usage(cache))
        for own, agreement, divergence, cache in zip(np.stack(losses, axis=1), agreements, means, caches, strict=True)
    ]


def gap_closed(perplexity: float, full: float, named: float) -> float:
    """Share of the gap between a named arm's perplexity and the full cache's that an arm closes; NaN without a gap.

    1 is the full cache, 0 the named arm; negative is worse than the named arm.
    """
    gap = named - full
    return (named - perplexity) / gap if gap else float("nan")

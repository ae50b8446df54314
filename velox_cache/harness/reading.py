"""Teacher-forced reading: what a model expects next at each token of a passage, under the caches it is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.harness.memory import CacheUsage, cache_usage
from velox_fn.engine.checks import whole_number


@dataclass(frozen=True, eq=False)
class Reading:
    """A passage of N tokens, and the model's next-token distributions before each."""

    logprobs: mx.array  # float32 [N, V]; row i is the distribution from which targets[i] would be drawn
    targets: mx.array  # int32 [N]
    usage: CacheUsage  # of the prompt cache after the passage


def read_passage(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    n_context: int,
    block_size: int = 1,
    prefill_step_size: int = 512,
    caches: Sequence[Any] | None = None,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> Reading:
    """Read `tokens` and keep the distributions of all after the first `n_context`.

    caches: empty ones; None for those that mlx_lm would make, which are evicting ones when they are installed on the
    model. The context goes in as mlx_lm's prefill does it, in blocks of `prefill_step_size`. The passage goes in in
    blocks of `block_size`: 1 is decoding. A larger block is faster. Its tokens see one another and all that was kept
    before it, so less is lost.
    `advance` is called with the tokens done.

    Holds N x V float32 numbers. Raises ValueError unless 1 <= n_context < len(tokens).
    """
    block_size = whole_number("block_size", block_size, 1)
    prefill_step_size = whole_number("prefill_step_size", prefill_step_size, 1)
    if not 1 <= n_context < len(tokens):
        raise ValueError(
            f"n_context must be at least 1 and leave tokens to predict, got {n_context} for {len(tokens)} tokens"
        )
    caches = make_prompt_cache(model) if caches is None else list(caches)
    start = n_context - 1  # the last token of the context predicts the first of the passage
    for at in range(0, start, prefill_step_size):
        block = list(tokens[at : min(at + prefill_step_size, start)])
        model(mx.array([block]), cache=caches)
        mx.eval([cache.state for cache in caches])
        advance(len(block))
    found = []
    for at in range(start, len(tokens) - 1, block_size):
        block = list(tokens[at : min(at + block_size, len(tokens) - 1)])
        logits = model(mx.array([block]), cache=caches)[0].astype(mx.float32)
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(found[-1])
        advance(len(block))
    return Reading(mx.concatenate(found), mx.array(list(tokens[n_context:]), mx.int32), cache_usage(caches))

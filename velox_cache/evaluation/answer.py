"""Greedy answers to a long prompt, with what they cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.harness.memory import CacheUsage, cache_usage
from velox_fn.engine.checks import whole_number

_UNTIMED = 4  # the first steps compile and warm up


@dataclass(frozen=True)
class Answer:
    """A model's answer."""

    text: str  # up to the first token that ends a generation
    tokens_per_second: float  # of decoding alone
    usage: CacheUsage  # of the prompt cache at the end


def greedy_answer(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: Sequence[int],
    *,
    n_tokens: int = 48,
    prefill_step_size: int = 512,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> Answer:
    """The greedy continuation of `prompt` by mlx_lm's own generation loop, with the caches installed on the model.

    Always decodes `n_tokens` tokens, past the answer's end too, so that speed and memory of two caches compare. The
    first four are not timed. `advance` is called with the tokens done. Raises ValueError unless n_tokens > 4.
    """
    n_tokens = whole_number("n_tokens", n_tokens, _UNTIMED + 1)
    caches = make_prompt_cache(model)
    done, found, start = 0, [], 0.0

    def on_prefill(processed: int, total: int) -> None:
        nonlocal done
        advance(processed - done)
        done = processed

    steps = generate_step(
        mx.array(list(prompt)),
        model,
        max_tokens=n_tokens,
        prompt_cache=caches,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=on_prefill,
    )
    for token, _ in steps:
        found.append(token)
        advance(1)
        if len(found) == _UNTIMED:
            start = time.perf_counter()
    speed = (n_tokens - _UNTIMED) / (time.perf_counter() - start)
    end = next((i for i, token in enumerate(found) if token in tokenizer.eos_token_ids), n_tokens)
    return Answer(tokenizer.decode(found[:end]).strip(), speed, cache_usage(caches))

"""One call from a prompt to a reply inside a bounded cache; what was read before the question may stand apart."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.harness.memory import CacheUsage, cache_usage
from velox_cache.installation.installed import InstalledCaches
from velox_cache.installation.installing import install, uninstall
from velox_cache.installation.report import InstallReport
from velox_cache.introspection.read_context import read_context
from velox_fn.engine.checks import whole_number

_MARK = "<velox: here the question begins>"


@dataclass(frozen=True)
class Generation:
    """A reply, and what it took."""

    text: str
    prompt_tokens: int
    usage: CacheUsage  # rows and bytes at the end
    report: InstallReport | None  # what was installed for this call; None: the model had its caches already

    def __str__(self) -> str:
        return self.text


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str,
    *,
    context: str | None = None,
    budget: int | float | None = None,
    max_tokens: int = 256,
    chat: bool | None = None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    **settings: Any,
) -> Generation:
    """A reply to `prompt` from a model whose caches are bounded for this call.

    context: what the prompt is about. It is read and evicted from before the question is seen, so that the cache could
    serve any other question as well.
    budget: rows kept, or a share of the prompt's tokens (context included) between 0 and 1, such as 0.25.
    settings: the other arguments of `velox_cache.install`, such as method and calibration. On a model with evicting
    caches installed, leave budget and settings out: those caches are used.
    chat: wrap the text in the model's chat template; by default when it has one.
    sampler: from log-probabilities [1,V] to tokens [1], as mlx_lm makes them; greedy by default.

    Raises ValueError as `install` does, and when the prompt is empty, a share is not between 0 and 1, or caches are
    installed already and others are asked for. The model ends up as it was.
    """
    whole_number("max_tokens", max_tokens, 1)
    read_first, tokens = prompt_parts(tokenizer, prompt, context, chat)
    n_prompt = len(read_first) + len(tokens)
    installed = isinstance(model.__dict__.get("make_cache"), InstalledCaches)
    if installed and (budget is not None or settings):
        raise ValueError(
            "this model has evicting caches installed, and others are asked for: leave budget and the other settings "
            "out, or call velox_cache.uninstall(model) first"
        )
    report = None
    if not installed:
        report = install(model, budget=rows_of(budget, n_prompt), tokenizer=tokenizer, **settings)
    try:
        caches = make_prompt_cache(model)
        read_context(model, read_first, caches)
        pieces = stream_generate(model, tokenizer, tokens, max_tokens=max_tokens, sampler=sampler, prompt_cache=caches)
        text = "".join(piece.text for piece in pieces)
        return Generation(text, n_prompt, cache_usage(caches), report)
    finally:
        if not installed:
            uninstall(model)


def rows_of(budget: int | float | None, n_prompt: int) -> int | None:
    """The budget in rows, where it may be a share of a prompt's tokens. Raises ValueError for other fractions."""
    if not isinstance(budget, float):
        return budget
    if not 0 < budget < 1:
        raise ValueError(
            f"budget is a number of rows, such as 512, or a share of the prompt between 0 and 1, such as 0.25; got "
            f"{budget!r}"
        )
    return max(1, round(budget * n_prompt))


def prompt_parts(
    tokenizer: TokenizerWrapper, prompt: str, context: str | None = None, chat: bool | None = None
) -> tuple[list[int], list[int]]:
    """The tokens that are read first, none without a context, and those of the question.

    Both together are a prompt inside the chat template when `chat`, or when the tokenizer has one and `chat` is None.
    Raises ValueError for an empty prompt, for one that is no text, and when a template is asked for and there is none.
    """
    for given in (prompt,) if context is None else (prompt, context):
        if not isinstance(given, str):
            raise ValueError(
                f"prompt and context must be text, got {type(given).__name__}; of tokens give tokenizer.decode(tokens)"
            )
    if not prompt.strip():
        raise ValueError("the prompt is empty; give it some text")
    if chat and not tokenizer.has_chat_template:
        raise ValueError("this model has no chat template; leave chat (--chat) out")
    text = prompt if context is None else f"{context}{_MARK}\n\n{prompt}"
    if chat is False or not tokenizer.has_chat_template:
        if context is None:
            return [], list(tokenizer.encode(text))
        first, _, second = text.rpartition(_MARK)
        return list(tokenizer.encode(first)), list(tokenizer.encode(second, add_special_tokens=False))
    messages = [{"role": "user", "content": text}]
    if context is None:
        return [], list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    wrapped = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    first, _, second = wrapped.rpartition(_MARK)
    return list(tokenizer.encode(first, add_special_tokens=False)), list(
        tokenizer.encode(second, add_special_tokens=False)
    )

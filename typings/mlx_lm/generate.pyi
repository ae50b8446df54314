from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .tokenizer_utils import TokenizerWrapper

generation_stream: mx.ThreadLocalStream

class GenerationResponse:
    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None

class BatchResponse:
    texts: list[str]
    stats: Any
    caches: list[list[Any]] | None
    token_ids: list[list[int]] | None
    logprobs: list[list[float]] | None

def generate_step(
    prompt: mx.array,
    model: nn.Module,
    *,
    max_tokens: int = ...,
    sampler: Callable[[mx.array], mx.array] | None = ...,
    logits_processors: list[Callable[[mx.array, mx.array], mx.array]] | None = ...,
    max_kv_size: int | None = ...,
    prompt_cache: Any = ...,
    prefill_step_size: int = ...,
    kv_bits: int | None = ...,
    kv_group_size: int = ...,
    quantized_kv_start: int = ...,
    prompt_progress_callback: Callable[[int, int], None] | None = ...,
    input_embeddings: mx.array | None = ...,
) -> Generator[tuple[int, mx.array]]: ...
def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int = ...,
    draft_model: nn.Module | None = ...,
    **kwargs: Any,
) -> Generator[GenerationResponse]: ...
def generate(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: str | list[int], verbose: bool = ..., **kwargs: Any
) -> str: ...
def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: list[list[int]],
    prompt_caches: list[list[Any]] | None = ...,
    max_tokens: int | list[int] = ...,
    verbose: bool = ...,
    return_prompt_caches: bool = ...,
    return_token_ids: bool = ...,
    return_logprobs: bool = ...,
    **kwargs: Any,
) -> BatchResponse: ...

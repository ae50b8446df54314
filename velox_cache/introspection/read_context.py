"""Read tokens into a prompt cache, in the blocks in which mlx_lm reads prompts."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step


def read_context(model: nn.Module, tokens: Sequence[int], caches: list[Any]) -> None:
    """Read tokens into caches, which evict before anything else is seen. Nothing for no tokens."""
    if tokens:
        for _ in generate_step(mx.array(list(tokens)), model, max_tokens=0, prompt_cache=caches):
            pass

from collections.abc import Callable

import mlx.core as mx

def make_sampler(
    temp: float = ..., top_p: float = ..., min_p: float = ..., min_tokens_to_keep: int = ..., top_k: int = ...
) -> Callable[[mx.array], mx.array]: ...

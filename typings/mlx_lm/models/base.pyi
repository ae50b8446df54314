from typing import Any

import mlx.core as mx

def create_causal_mask(
    N: int,
    offset: int = ...,
    window_size: int | None = ...,
    right_padding: mx.array | None = ...,
    left_padding: mx.array | None = ...,
) -> mx.array: ...
def create_attention_mask(
    h: mx.array, cache: Any = ..., window_size: int | None = ..., return_array: bool = ...
) -> mx.array | str | None: ...
def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = ...,
) -> mx.array: ...

"""A model whose every prediction is known."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class NextIsPlusOne(nn.Module):
    """Gives the probability p to the token after the current one, and shares the rest among the others."""

    def __init__(self, n_tokens: int, p: float) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        rest = (1 - p) / (n_tokens - 1)
        self.table = mx.log(mx.array(np.where(np.roll(np.eye(n_tokens), 1, axis=1) == 1, p, rest), mx.float32))

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        return self.table[tokens] + 7  # logits are only defined up to a constant

"""Greedy replies, each prompt alone and all in one ragged batch of mlx_lm's."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step

N_TOKENS = 12


def one_by_one(model: nn.Module, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The tokens of each reply, from caches of its own."""
    return [[int(token) for token, _ in generate_step(mx.array(one), model, max_tokens=N_TOKENS)] for one in prompts]


def in_one_batch(model: nn.Module, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The tokens of each reply, from caches that all share."""
    generator = BatchGenerator(model)
    uids = generator.insert(prompts, [N_TOKENS] * len(prompts))
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    return [tokens[uid] for uid in uids]

"""Batches in models that mix attention with something else, or whose keys are made in parts."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step

import velox_cache as vc
from velox_cache.architectures.tiny import tiny_model

ARCHITECTURES = ["minicpm3", "youtu_llm", "granitemoehybrid", "nemotron_h", "jamba", "lfm2", "plamo2"]
# Their recurrent layers take the padding of a ragged prefill in, with plain caches too.
MIX_PADDING_IN = ("jamba", "nemotron_h")
TOKENS = [(7 * i * i + 3 * i) % 61 for i in range(90)]
RAGGED = [TOKENS[:5], TOKENS, TOKENS[20:60]]
EVEN = [TOKENS[:60], TOKENS[30:], TOKENS[20:80]]
N_TOKENS = 12
METHODS: list[tuple[str, dict[str, Any]]] = [("qfilters", {"calib_tokens": 8}), ("keydiff", {}), ("streaming_llm", {})]


def together(model: nn.Module, prompts: Sequence[list[int]]) -> np.ndarray:
    """Log-probabilities [prompts, N_TOKENS, V] under mlx_lm's batch generator."""
    generator = BatchGenerator(model)
    uids = generator.insert(prompts, [N_TOKENS] * len(prompts))
    found: dict[int, list[np.ndarray]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(np.array(response.logprobs))
    generator.close()
    return np.array([found[uid] for uid in uids])


def alone(model: nn.Module, prompt: list[int]) -> np.ndarray:
    steps = generate_step(mx.array(prompt), model, max_tokens=N_TOKENS)
    return np.array([np.array(logprobs) for _, logprobs in steps])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("method", "settings"), METHODS, ids=str)
def test_batch_within_budget_says_what_plain_caches_do(
    architecture: str, method: str, settings: dict[str, Any]
) -> None:
    model = tiny_model(architecture)
    expected = together(model, RAGGED)
    vc.install(model, method, budget=200, **settings)
    np.testing.assert_allclose(together(model, RAGGED), expected, atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("method", "settings"), METHODS, ids=str)
def test_batch_over_budget_says_what_each_prompt_does_alone(
    architecture: str, method: str, settings: dict[str, Any]
) -> None:
    model = tiny_model(architecture)
    prompts = EVEN if architecture in MIX_PADDING_IN else RAGGED
    vc.install(model, method, budget=24, **settings)
    found = together(model, prompts)
    for row, prompt in zip(found, prompts, strict=True):
        np.testing.assert_allclose(row, alone(model, prompt), atol=1e-3)

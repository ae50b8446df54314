"""A budget that the text does not fill changes nothing, however the text comes in."""

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from runs import (
    BATCHED,
    BATCHED_WITHOUT_PADDING,
    BOUNDED,
    PROMPT,
    PROMPTS,
    PROMPTS_OF_ONE_LENGTH,
    SPLITS,
    batched,
    furthest,
    installed,
    run,
)
from tiny_models import model_of

import velox_cache as vc

BUDGET = 64


@cache
def plain_logits(architecture: str, split: str) -> np.ndarray:
    return run(model_of(architecture), SPLITS[split])[0]


@pytest.mark.parametrize(
    "split", ["in chunks", *(pytest.param(split, marks=pytest.mark.slow) for split in SPLITS if split != "in chunks")]
)  # in chunks: a block from nothing, a token, and a block after rows
@pytest.mark.parametrize("architecture", BOUNDED)
def test_logits_are_the_plain_caches_bit_for_bit(architecture: str, split: str) -> None:
    with installed(architecture, budget=BUDGET) as model:
        logits, _ = run(model, SPLITS[split])
    np.testing.assert_array_equal(logits, plain_logits(architecture, split))


@pytest.mark.parametrize("architecture", BATCHED)
def test_a_ragged_batch_is_the_plain_caches(architecture: str) -> None:
    plain = batched(model_of(architecture), PROMPTS)
    with installed(architecture, budget=BUDGET) as model:
        ours = batched(model, PROMPTS)
    assert max(map(furthest, ours, plain)) < 1e-4  # plain batches of other widths differ by as much as 2e-5


@pytest.mark.parametrize("architecture", BATCHED_WITHOUT_PADDING)
def test_a_batch_without_padding_is_the_plain_caches_bit_for_bit(architecture: str) -> None:
    plain = batched(model_of(architecture), PROMPTS_OF_ONE_LENGTH)
    with installed(architecture, budget=BUDGET) as model:
        np.testing.assert_array_equal(batched(model, PROMPTS_OF_ONE_LENGTH), plain)


@pytest.mark.parametrize("architecture", BOUNDED)
def test_saved_and_loaded_caches_go_on_as_if_nothing_had_been(architecture: str, tmp_path: Path) -> None:
    with installed(architecture, budget=BUDGET) as model:
        caches = make_prompt_cache(model)
        model(mx.array([PROMPT[:17]]), cache=caches)
        vc.save_prompt_cache(tmp_path / "prompt", caches)
        caches = vc.load_prompt_cache(tmp_path / "prompt.safetensors")
        token, rest = (model(mx.array([call]), cache=caches)[0] for call in (PROMPT[17:18], PROMPT[18:]))
        logits = np.array(mx.concatenate([token, rest]).astype(mx.float32))
    np.testing.assert_array_equal(logits, plain_logits(architecture, "in chunks")[17:])

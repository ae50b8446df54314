"""Budgets of each layer's own in a ragged batch: each row is as alone, or there is no batch."""

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from runs import BATCHED, BOUNDED, PROMPT, PROMPTS, batched, evicting, furthest, installed, rows_of, run
from tiny_models import model_of

import velox_cache as vc
from velox_cache.architectures.tiny import tiny_model
from velox_cache.architectures.verdict import verdict
from velox_cache.introspection.plan import asks_for_mask_arrays

# The first is not called layer by layer; mlx_lm has no batches of the others.
ONE_AT_A_TIME = ("iquestloopcoder", "gpt_bigcode", "llama4")
MASK_ARRAYS = tuple(name for name in BOUNDED if asks_for_mask_arrays(model_of(name)))


def budget(layer: int) -> int:
    return 20 - 4 * layer


@pytest.mark.parametrize("architecture", [name for name in BATCHED if name not in ONE_AT_A_TIME])
def test_each_row_of_a_ragged_batch_is_as_it_is_alone(architecture: str) -> None:
    with installed(architecture, budget=budget) as model:
        together = batched(model, PROMPTS)
        alone = [batched(model, [prompt])[0] for prompt in PROMPTS]
    assert max(map(furthest, together, alone)) < 1e-4


@pytest.mark.parametrize("queries", ["true", "proxy"])
def test_scores_by_attention_are_those_of_each_row_alone(queries: str) -> None:
    with installed("llama", "h2o", budget=lambda layer: 24 - 4 * layer, grace=4, queries=queries) as model:
        together = batched(model, PROMPTS)
        alone = [batched(model, [prompt])[0] for prompt in PROMPTS]
    assert max(map(furthest, together, alone)) < 1e-4


@pytest.mark.parametrize("architecture", ONE_AT_A_TIME)
def test_models_that_take_no_mask_of_a_layers_own_are_not_batched(architecture: str) -> None:
    with installed(architecture, budget=budget) as model:
        assert not any(hasattr(cache, "merge") for cache in evicting(make_prompt_cache(model)))


@pytest.mark.parametrize("architecture", MASK_ARRAYS)
def test_chunks_over_the_budget_see_each_layers_own_rows(architecture: str) -> None:
    """A block after evictions: its tokens' logits are those that it gives one by one from the same caches, whose masks
    are None."""
    with installed(architecture, budget=budget) as model:
        check_a_block_over_the_budget(model)


def test_a_model_that_cannot_be_batched_has_them_for_one_sequence_with_masks_as_arrays() -> None:
    """mlx_lm's dynamic NTK scaling takes no offsets of several sequences, its own caches' neither."""
    model = tiny_model("deepseek_v3", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert asks_for_mask_arrays(model)
    assert verdict(model).alone
    vc.install(model, "l2norm", budget=budget)
    check_a_block_over_the_budget(model)
    assert not any(hasattr(cache, "merge") for cache in evicting(make_prompt_cache(model)))


def check_a_block_over_the_budget(model: nn.Module) -> None:
    _, caches = run(model, (24,))
    assert [cache.size() for cache in evicting(caches)] == [
        cache.method.settings["budget"] for cache in evicting(caches)
    ]
    one_by_one = copy.deepcopy(caches)
    block = model(mx.array([PROMPT[24:26]]), cache=caches)[0, 0]
    alone = model(mx.array([PROMPT[24:25]]), cache=one_by_one)[0, 0]
    assert furthest(rows_of(block), rows_of(alone)) < 1e-4

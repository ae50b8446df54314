"""Budgets of each layer's own in a ragged batch: each row is as alone, or there is no batch."""

import pytest
from mlx_lm.models.cache import make_prompt_cache
from runs import BATCHED, BOUNDED, PROMPTS, batched, evicting, furthest, installed
from tiny_models import model_of

import velox_cache as vc
from velox_cache.introspection.plan import asks_for_mask_arrays

# Attention by hand, layers that read the rows of another, or caches that mlx_lm cannot batch.
ONE_AT_A_TIME = ("gemma4", "gemma4_text", "iquestloopcoder", "llama4", "mistral4", "plamo2")
ONE_BUDGET = tuple(name for name in BOUNDED if asks_for_mask_arrays(model_of(name)))


def budget(layer: int) -> int:
    return 20 - 4 * layer


@pytest.mark.parametrize("architecture", [name for name in BATCHED if name not in (*ONE_AT_A_TIME, *ONE_BUDGET)])
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


@pytest.mark.parametrize("architecture", ONE_BUDGET)
def test_models_that_make_one_mask_array_for_all_layers_are_refused(architecture: str) -> None:
    with pytest.raises(ValueError, match="give every layer the same budget"):
        vc.install(model_of(architecture), "l2norm", budget=budget)

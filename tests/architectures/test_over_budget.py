"""Past the budget: rows kept are the model's own at their positions, and a batch keeps what each row would alone."""

from collections.abc import Sequence
from typing import Any

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
    batched,
    evicting,
    furthest,
    installed,
    rows_of,
    run,
)
from tiny_models import model_of

from velox_cache.introspection.query_tap import flat_caches
from velox_fn import kept_positions, kv

BUDGET = 12


@pytest.mark.parametrize("architecture", BOUNDED)
def test_kept_rows_are_the_plain_caches_own_at_their_positions(architecture: str) -> None:
    _, plain = run(model_of(architecture), (len(PROMPT),))
    with installed(architecture, budget=BUDGET) as model:
        _, caches = run(model, (len(PROMPT),))
    of_plain = [cache for cache in flat_caches(plain) if type(cache).__name__ == "KVCache"]
    for own, cache in zip(of_plain, evicting(caches), strict=True):
        positions = np.array(kept_positions(cache.record))
        assert positions.shape[2] == cache.size() == BUDGET
        assert (np.diff(positions) > 0).all()
        for kept, everything in zip(kv(cache.record), own.state[:2], strict=True):
            expected = np.take_along_axis(rows_of(everything), positions[..., None], axis=2)
            np.testing.assert_array_equal(rows_of(kept), expected)


@pytest.mark.parametrize("architecture", BOUNDED)
def test_offsets_count_every_token_and_rows_stay_in_the_budget(architecture: str) -> None:
    with installed(architecture, budget=BUDGET) as model:
        _, caches = run(model, (17, 1, 1, 9))
    assert {(cache.offset, cache.size()) for cache in evicting(caches)} == {(len(PROMPT), BUDGET)}


@pytest.mark.parametrize(
    ("architecture", "prompts"),
    [(name, PROMPTS) for name in BATCHED] + [(name, PROMPTS_OF_ONE_LENGTH) for name in BATCHED_WITHOUT_PADDING],
)
def test_each_row_of_a_batch_is_as_it_is_alone(architecture: str, prompts: Sequence[list[int]]) -> None:
    with installed(architecture, budget=BUDGET) as model:
        together = batched(model, prompts)
        alone = [batched(model, [prompt])[0] for prompt in prompts]
    assert max(map(furthest, together, alone)) < 1e-4


@pytest.mark.parametrize("architecture", BOUNDED)
def test_bytes_are_those_of_the_arrays_held(architecture: str) -> None:
    with installed(architecture, budget=BUDGET) as model:
        caches = make_prompt_cache(model)
        model(mx.array([PROMPT]), cache=caches)
        mx.eval([cache.state for cache in caches])
    for cache in evicting(caches):
        assert cache.nbytes == sum(array.nbytes for array in held(cache).values())


def held(value: Any, found: dict[int, mx.array] | None = None) -> dict[int, mx.array]:
    """Every array that can be reached from `value` through attributes and containers, by identity."""
    found = {} if found is None else found
    if isinstance(value, mx.array):
        found[id(value)] = value
    elif isinstance(value, list | tuple):
        for part in value:
            held(part, found)
    elif isinstance(value, dict):
        held(list(value.values()), found)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith(("velox_cache.", "velox_fn.")):
        held(vars(value), found)
    return found

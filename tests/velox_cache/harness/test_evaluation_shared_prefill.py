"""One prefill for many caches, and decoding them side by side, equal each cache by itself."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.harness.side_by_side import side_by_side
from velox_cache.introspection.query_tap import observe_queries
from velox_fn.engine.eviction import kept_positions

PROMPT = [int(token) for token in np.random.default_rng(0).integers(97, size=60)]
ARMS = [
    FULL,
    Arm("qfilters", "qfilters", {"budget": 24, "n_sink": 2, "calib_tokens": 16}),
    Arm("streaming_llm", "streaming_llm", {"budget": 40}),
    Arm("h2o", "h2o", {"budget": 24}),
    Arm("snapkv", "snapkv", {"budget": 24, "obs_window": 8}),
    Arm("curdkv", "curdkv", {"budget": 24}),
    Arm("wide", "l2norm", {"budget": 200}),
]


def by_itself(model, arm, tokens, n_prompt):
    """Logits after each of `tokens[n_prompt:]`, and the caches, without anything shared."""
    caches = cache_maker(model, arm)()
    found = []
    with observe_queries(model):
        mx.eval(model(mx.array([tokens[:n_prompt]]), cache=caches))
        for token in tokens[n_prompt:]:
            found.append(np.array(model(mx.array([[token]]), cache=caches)[0, -1]))
    return np.stack(found), caches


@pytest.fixture(params=["llama", "gemma3_text"])
def model(request, tiny_model):
    return tiny_model(request.param)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.label)
def test_what_follows_a_shared_prefill_equals_the_ordinary_path(model, arm):
    expected, alone = by_itself(model, arm, PROMPT, 50)
    caches = shared_prefill(model, PROMPT[:50]).into(cache_maker(model, arm)())
    with side_by_side(model, [caches]) as step:
        found = np.stack([np.array(step([token])[0]) for token in PROMPT[50:]])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for one, other in zip(caches, alone, strict=True):
        if isinstance(one, EvictingKVCache):
            assert kept_positions(one.record).tolist() == kept_positions(other.record).tolist()


def test_caches_side_by_side_see_what_they_would_see_alone(model):
    prefill = shared_prefill(model, PROMPT[:50])
    with side_by_side(model, [prefill.into(cache_maker(model, arm)()) for arm in ARMS]) as step:
        found = np.stack([np.array(step([token] * len(ARMS))) for token in PROMPT[50:]], axis=1)
    for rows, arm in zip(found, ARMS, strict=True):
        np.testing.assert_allclose(rows, by_itself(model, arm, PROMPT, 50)[0], atol=2e-5, err_msg=arm.label)


def test_rows_side_by_side_may_read_different_tokens(model):
    prefill = shared_prefill(model, PROMPT[:50])
    streams = [PROMPT[50:], PROMPT[40:50]]
    arm = ARMS[1]
    with side_by_side(model, [prefill.into(cache_maker(model, arm)()) for _ in streams]) as step:
        found = np.stack([np.array(step(tokens)) for tokens in zip(*streams, strict=True)], axis=1)
    for rows, stream in zip(found, streams, strict=True):
        np.testing.assert_allclose(rows, by_itself(model, arm, [*PROMPT[:50], *stream], 50)[0], atol=2e-5)


def test_one_prefill_serves_many_caches_and_stays_as_it_was(model):
    prefill = shared_prefill(model, PROMPT[:50])
    first = prefill.into(cache_maker(model, FULL)())
    with side_by_side(model, [first]) as step:
        expected = np.array(step([1]))
        step([2])
    with side_by_side(model, [prefill.into(cache_maker(model, FULL)())]) as step:
        np.testing.assert_array_equal(np.array(step([1])), expected)


def test_a_used_cache_is_not_filled_again(tiny_model):
    model = tiny_model()
    prefill = shared_prefill(model, PROMPT)
    caches = prefill.into(cache_maker(model, ARMS[2])())
    with pytest.raises(ValueError, match="make new ones"):
        prefill.into(caches)


def test_an_empty_prompt_is_refused(tiny_model):
    with pytest.raises(ValueError, match="nothing to prefill"):
        shared_prefill(tiny_model(), [])

"""What holds exactly on a real model: the first block, and everything within budget."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from velox_cache import EvictingKVCache
from velox_fn import qfilters
from velox_fn.registry import method_factory

pytestmark = pytest.mark.real_model
TOKENS = np.random.default_rng(0).integers(100, 20000, 320).tolist()


def logits(model, caches, calls):
    """Logits of every call, as float32 arrays."""
    outputs, start = [], 0
    for n_tokens in calls:
        outputs.append(np.array(model(mx.array([TOKENS[start : start + n_tokens]]), cache=caches).astype(mx.float32)))
        start += n_tokens
    return outputs


def evicting(model, method):
    return [EvictingKVCache(method) for _ in model.layers]


@pytest.mark.parametrize("method", ["qfilters", "h2o"])
def test_first_block_logits_equal_the_uncompressed_caches_exactly(smollm2, method):
    # for every method
    model, _ = smollm2
    (expected,) = logits(model, [KVCache() for _ in model.layers], [40])
    (found,) = logits(model, evicting(model, method_factory(method)(budget=40 - 3, n_sink=2)), [40])
    np.testing.assert_array_equal(found, expected)


def test_within_budget_every_logit_equals_the_uncompressed_caches_exactly(smollm2):
    model, _ = smollm2
    calls = [20, 9, *[1] * 6]
    expected = logits(model, [KVCache() for _ in model.layers], calls)
    for found, exact in zip(logits(model, evicting(model, qfilters(budget=35)), calls), expected, strict=True):
        np.testing.assert_array_equal(found, exact)

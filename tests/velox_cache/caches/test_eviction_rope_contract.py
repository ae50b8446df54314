"""Rows keep the rotation of their true positions, and new tokens get theirs: offset counts tokens, not rows."""

import mlx.core as mx
import numpy as np
import pytest
from calibrated import needed_arrays
from mlx_lm.models.cache import KVCache

from velox_cache import EvictingKVCache
from velox_fn import METHODS, kept_positions, kv
from velox_fn.registry import method_factory

TOKENS = np.random.default_rng(0).integers(0, 97, 60).tolist()


def first_layer_keys(model, tokens):
    """Keys [H,N,D] of the first layer in the uncompressed cache: they depend on token and position alone."""
    caches = [KVCache() for _ in model.layers]
    model(mx.array([tokens]), cache=caches)
    return np.array(caches[0].keys_and_values()[0])[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("calls", [[60], [25, 25, *[1] * 10], [1] * 60], ids=["block", "mixed", "one by one"])
def test_kept_keys_are_rotated_by_their_true_positions(tiny_model, method, calls):
    # for every method
    model = tiny_model()
    caches = [
        EvictingKVCache(method_factory(method)(budget=40, n_sink=2, **needed_arrays(method))) for _ in model.layers
    ]
    start = 0
    for n_tokens in calls:
        model(mx.array([TOKENS[start : start + n_tokens]]), cache=caches)
        start += n_tokens
    assert caches[0].offset == 60
    full = first_layer_keys(model, TOKENS)
    for head, positions in enumerate(np.array(kept_positions(caches[0].record))[0]):
        np.testing.assert_allclose(np.array(kv(caches[0].record)[0])[0, head], full[head, positions], atol=1e-5)


def test_rows_of_a_batch_are_rotated_by_their_own_positions(tiny_model):
    model = tiny_model()
    caches = [EvictingKVCache(method_factory("qfilters")(budget=20, calib_tokens=5)) for _ in model.layers]
    model(mx.array([TOKENS[:45]]), cache=caches)
    batch = [EvictingKVCache.merge([cache, EvictingKVCache(cache.method)]) for cache in caches]
    for t in range(15):
        model(mx.array([[TOKENS[45 + t]], [TOKENS[t]]]), cache=batch)
    for b, tokens in enumerate((TOKENS, TOKENS[:15])):
        row = batch[0].extract(b)
        full = first_layer_keys(model, tokens)
        for head, positions in enumerate(np.array(kept_positions(row.record))[0]):
            np.testing.assert_allclose(np.array(kv(row.record)[0])[0, head], full[head, positions], atol=1e-5)

"""Snapshots of earlier boundaries belong to the sequences that they were made of."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import EvictingKVCache
from velox_fn import kv, l2norm

BEYOND_A_BOUNDARY = 5


def rows(n_tokens: int, seed: int) -> mx.array:
    return mx.random.normal((1, 1, n_tokens, 32), key=mx.random.key(seed))


def batch() -> EvictingKVCache:
    """Two sequences, 18 tokens each, that evicted at 8 and 16."""
    method = l2norm(budget=8, n_sink=0, interval=8)
    together = EvictingKVCache.merge([EvictingKVCache(method, snapshots=3) for _ in range(2)])
    for seed, n_tokens in enumerate((8, 8, 2)):
        block = mx.concatenate([rows(n_tokens, seed), rows(n_tokens, seed + 100)])
        together.update_and_fetch(block, block)
    return together


def test_a_batch_goes_back_to_its_own_snapshot():
    together = batch()
    assert together.trim(BEYOND_A_BOUNDARY) == BEYOND_A_BOUNDARY
    kept = kv(together.record)[0][:, 0, -5:]
    np.testing.assert_array_equal(kept, mx.concatenate([rows(8, 1), rows(8, 101)])[:, 0, :5])


@pytest.mark.parametrize("indices", [[1, 0], [0], [1]])
def test_no_snapshot_of_other_sequences_is_gone_back_to_after_a_filter(indices):
    together = batch()
    together.filter(indices)
    with pytest.raises(ValueError, match="none of the 0 snapshots"):
        together.trim(BEYOND_A_BOUNDARY)


def test_no_snapshot_of_other_sequences_is_gone_back_to_after_others_joined():
    together = batch()
    together.extend(batch())
    with pytest.raises(ValueError, match="none of the 0 snapshots"):
        together.trim(BEYOND_A_BOUNDARY)

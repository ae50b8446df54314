"""Snapshots of earlier boundaries belong to the sequences that they were made of."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import EvictingKVCache
from velox_fn import kept_positions, kv, l2norm

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


def gone_back(cache: EvictingKVCache) -> mx.array:
    """The last five rows [B,5,D] of the first head, after as many tokens were taken back beyond a boundary."""
    assert cache.trim(BEYOND_A_BOUNDARY) == BEYOND_A_BOUNDARY
    return kv(cache.record)[0][:, 0, -5:]


def expected(*seeds: int) -> mx.array:
    return mx.concatenate([rows(8, seed) for seed in seeds])[:, 0, :5]


def test_a_batch_goes_back_to_its_own_snapshot():
    np.testing.assert_array_equal(gone_back(batch()), expected(1, 101))


@pytest.mark.parametrize("indices", [[1, 0], [0], [1]])
def test_snapshots_leave_and_change_places_with_their_sequences(indices):
    together = batch()
    together.filter(indices)
    np.testing.assert_array_equal(gone_back(together), expected(*([1, 101][index] for index in indices)))


@pytest.mark.parametrize("index", [0, 1])
def test_a_sequence_takes_its_snapshots_out_of_a_batch(index):
    np.testing.assert_array_equal(gone_back(batch().extract(index)), expected([1, 101][index]))


def test_snapshots_join_with_their_sequences():
    together, alone = batch(), EvictingKVCache(l2norm(budget=8, n_sink=0, interval=8), snapshots=3)
    for n_tokens in (8, 8, 4):
        alone.update_and_fetch(rows(n_tokens, 200 + n_tokens), rows(n_tokens, 200 + n_tokens))
    together.extend(batch())
    together.extend(EvictingKVCache.merge([alone]))
    kept = kept_positions(together.record).max(axis=(1, 2)).tolist()
    assert kept == [17, 17, 17, 17, 19]
    assert together.trim(BEYOND_A_BOUNDARY) == BEYOND_A_BOUNDARY
    back = kept_positions(together.record).max(axis=(1, 2)).tolist()
    assert back == [12, 12, 12, 12, 14]
    np.testing.assert_array_equal(kv(together.extract(3).record)[0][:, 0, -5:], expected(101))


def test_snapshots_show_no_rows_that_were_quantised_since():
    with pytest.raises(ValueError, match="none of the 0 snapshots"):
        batch().to_quantized(group_size=32, bits=8).trim(BEYOND_A_BOUNDARY)

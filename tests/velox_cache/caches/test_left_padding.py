"""A batch padded on the left: each sequence sees and keeps what it would alone, in the same calls of real tokens."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import EvictingKVCache
from velox_fn import h2o, kept_positions, kv, l2norm, qfilters

H, D, SCALE = 2, 16, 0.25
METHODS = {
    "static": l2norm(budget=24, n_sink=2, recent=8),
    "estimates its filters": qfilters(budget=24, n_sink=2, recent=8, calib_tokens=12),
    "by queries": h2o(budget=24, n_sink=2),
}
LENGTHS = (40, 20, 23)
CUTS = (0, 10, 30, 40)  # of two sequences the first call is padding alone, and the second padding and tokens


def drawn(seed, n_tokens):
    rng = np.random.default_rng(seed)
    shapes = ((1, H, n_tokens, D), (1, H, n_tokens, D), (1, 2 * H, n_tokens, D))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def attended(cache, keys, values, queries, mask=None):
    """Attention of one call as a model with a tap computes it; float numbers stand for a mask that a model adds."""
    made = cache.make_mask(keys.shape[2])
    view = cache.update_and_fetch(mx.array(keys), mx.array(values))
    output = mx.fast.scaled_dot_product_attention(mx.array(queries), *view, scale=SCALE, mask=made)
    return np.array(cache.observe_queries(output, mx.array(queries), *view, SCALE))


def fresh(method):
    return EvictingKVCache(method, true_queries=True)


def padded(part, before):
    return np.pad(part, [(0, 0), (0, 0), (before, 0), (0, 0)], constant_values=np.nan)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_each_sequence_sees_and_keeps_what_it_does_alone(method):
    longest = max(LENGTHS)
    padding = [longest - n for n in LENGTHS]
    sequences = [drawn(seed, n + 9) for seed, n in enumerate(LENGTHS)]
    batch = fresh(method).to_batch(padding)
    assert batch.offset.tolist() == [-count for count in padding]
    singles = [fresh(method) for _ in LENGTHS]
    for start, stop in itertools.pairwise(CUTS):
        block = [
            np.concatenate(
                [
                    padded(one[i][:, :, :n], before)[:, :, start:stop]
                    for one, n, before in zip(sequences, LENGTHS, padding, strict=True)
                ]
            )
            for i in range(3)
        ]
        block[2] = np.nan_to_num(block[2])  # queries of padding are numbers; its keys and values reach nobody
        output = attended(batch, *block)
        for b, (one, before) in enumerate(zip(sequences, padding, strict=True)):
            first, last = max(start - before, 0), stop - before
            if last > 0:
                alone = attended(singles[b], *(part[:, :, first:last] for part in one))
                np.testing.assert_allclose(output[b : b + 1, :, -(last - first) :], alone, atol=1e-5)
        assert batch.offset.tolist() == [stop - before for before in padding]
    batch.finalize()
    for t in range(9):
        token = [
            np.concatenate([one[i][:, :, n + t : n + t + 1] for one, n in zip(sequences, LENGTHS, strict=True)])
            for i in range(3)
        ]
        output = attended(batch, *token)
        for b, single in enumerate(singles):
            alone = attended(single, *(part[b : b + 1] for part in token))
            np.testing.assert_allclose(output[b : b + 1], alone, atol=1e-5)
    for b, single in enumerate(singles):
        row = batch.extract(b)
        assert row.offset == single.offset
        np.testing.assert_array_equal(np.array(kept_positions(row.record)), np.array(kept_positions(single.record)))
        for found, expected in zip(kv(row.record), kv(single.record), strict=True):
            np.testing.assert_array_equal(np.array(found), np.array(expected))


def test_padding_goes_with_its_sequence():
    batch = fresh(METHODS["static"]).to_batch([0, 5, 2])
    batch.filter([2, 1])
    batch.extend(fresh(METHODS["static"]).to_batch([1]))
    assert batch.offset.tolist() == [-2, -5, -1]
    assert type(batch).from_state(batch.state).offset.tolist() == [-2, -5, -1]
    assert batch.extract(1).offset == 0

"""Who is in a batch: rows are named by whole numbers, and a batch may be left by all."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from velox_cache import EvictingKVCache
from velox_fn import kept_positions, kv, l2norm, qfilters

H, D = 2, 8


def cache():
    return EvictingKVCache(qfilters(budget=16, n_sink=2, filters=mx.ones((H, D))))


def block(n_tokens, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(mx.array(rng.standard_normal((1, H, n_tokens, D)).astype(np.float32)) for _ in range(2))


def read(n_tokens, seed=0):
    one = cache()
    one.update_and_fetch(*block(n_tokens, seed))
    return one


def assert_same(one, other):
    assert one.offset == other.offset
    assert kept_positions(one.record).tolist() == kept_positions(other.record).tolist()
    for a, b in zip(kv(one.record), kv(other.record), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.fixture
def left_by_all():
    batch = EvictingKVCache.merge([read(30), read(5)])
    batch.filter([])
    return batch


def test_a_batch_that_all_sequences_have_left_answers_as_one_that_holds_nothing(left_by_all):
    batch = left_by_all
    assert (batch.size(), batch.nbytes, batch.tokens_seen, batch.tokens_kept, batch.kept_bytes) == (0, 0, 0, 0, 0)
    assert (batch.full_seq_bytes, batch.compression_ratio) == (0, 1.0)
    assert batch.offset.shape == (0,)
    assert batch.trim(3) == 0
    batch.prepare(lengths=[], right_padding=[])
    batch.finalize()
    batch.filter([])
    assert EvictingKVCache.from_state(batch.state).empty()
    assert EvictingKVCache.merge([batch, batch]).empty()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda batch: batch.update_and_fetch(*block(1)), "no sequence is left"),
        (lambda batch: batch.make_mask(1), "no sequence is left"),
        (lambda batch: batch.make_mask(4, return_array=True), "no sequence is left"),
        (lambda batch: batch.extract(0), "idx must name one of the 0 sequences"),
        (lambda batch: batch.filter([0]), r"batch_indices\[0\] must name one of the 0 sequences"),
        (lambda batch: batch.prepare(lengths=[3], right_padding=[1]), "1 entries for a batch of 0 sequences"),
    ],
)
def test_a_batch_that_all_sequences_have_left_says_what_it_cannot_do(left_by_all, call, says):
    with pytest.raises(ValueError, match=says):
        call(left_by_all)


@pytest.mark.parametrize(
    "whole", [int, np.int64, np.uint8, lambda n: mx.array(n)], ids=["int", "int64", "uint8", "mlx"]
)
def test_rows_of_a_batch_are_named_by_any_whole_number(whole):
    rows = [read(20 + 20 * b, seed=b) for b in range(3)]
    batch = EvictingKVCache.merge(rows)
    assert_same(batch.extract(whole(1)), rows[1])
    batch.filter([whole(2), whole(0)])
    assert_same(batch.extract(whole(0)), rows[2])
    assert_same(batch.extract(-1), rows[0])


@pytest.mark.parametrize("row", [2, -3, 1.0, True, np.True_, "0", None], ids=repr)
def test_what_names_no_row_is_refused_and_changes_nothing(row):
    batch = EvictingKVCache.merge([cache()] * 2)
    with pytest.raises(ValueError, match="idx must"):
        batch.extract(row)
    with pytest.raises(ValueError, match=r"batch_indices\[1\] must"):
        batch.filter([0, row])
    assert batch.offset.tolist() == [0, 0]


@pytest.mark.parametrize("lengths", [[2.0, 5], [2, True], [-1, 5]], ids=str)
def test_lengths_that_are_no_counts_are_refused(lengths):
    batch = EvictingKVCache.merge([cache()] * 2)
    with pytest.raises(ValueError, match=r"lengths\[[01]\] must be"):
        batch.prepare(lengths=lengths, right_padding=[3, 0])


def test_a_batch_takes_its_method_from_its_sequences():
    with pytest.raises(ValueError, match="at least one cache"):
        EvictingKVCache.merge([])


@pytest.mark.parametrize("shape", [(1, 3, 5, 8), (1, 2, 5, 16)], ids=["heads", "head_dim"])
def test_rows_of_another_layer_are_refused_with_what_differs(shape):
    one, other = (EvictingKVCache(l2norm(budget=16)) for _ in range(2))
    one.update_and_fetch(*block(20))
    other.update_and_fetch(mx.ones(shape), mx.ones(shape))
    with pytest.raises(ValueError, match=r"cannot merge rows of different \(KV heads, head_dim, value_dim\)"):
        EvictingKVCache.merge([one, other])


@pytest.mark.parametrize("ours", [0, 1])
def test_other_caches_are_refused_by_their_full_name(ours):
    caches = [KVCache(), KVCache()]
    caches[ours] = cache()
    with pytest.raises(ValueError, match=r"got a mlx_lm\.models\.cache\.KVCache"):
        EvictingKVCache.merge(caches)
    with pytest.raises(ValueError, match=r"got a mlx_lm\.models\.cache\.BatchKVCache"):
        EvictingKVCache.merge([caches[ours]]).extend(KVCache.merge([KVCache()]))

"""Row b of a ragged batch sees and keeps exactly what it would alone, under the same calls."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import EvictingKVCache
from velox_fn import kept_positions, kv, qfilters

H, D, D_V = 2, 16, 8
FILTERS = mx.array(np.random.default_rng(1).standard_normal((H, D)).astype(np.float32))
METHODS = {
    "calibrated": {"filters": FILTERS},
    "recent": {"filters": FILTERS, "recent": 4},
    "recent longer than a row": {"filters": FILTERS, "recent": 25},
    "fallback": {"calib_tokens": 20},
    "fallback over budget": {"calib_tokens": 45, "recent": 4},
}
N_DECODE, STEP = 45, 37

every_method = pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)


def method(settings):
    return qfilters(**{"budget": 32, "n_sink": 2} | settings)


def drawn(n_tokens, seed):
    rng = np.random.default_rng(seed)
    shapes = ((1, H, n_tokens, D), (1, H, n_tokens, D_V), (1, 2 * H, n_tokens, D))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def attend(cache, keys, values, queries):
    """Attention output of one call, as a model computes it."""
    mask = cache.make_mask(keys.shape[2])
    view = cache.update_and_fetch(mx.array(keys), mx.array(values))
    return np.array(mx.fast.scaled_dot_product_attention(mx.array(queries), *view, scale=0.25, mask=mask))


def padded(parts, fill):
    """Arrays [1,H,n_b,...] as one batch [B,H,S,...], `fill` behind the shorter ones."""
    longest = max(part.shape[2] for part in parts)
    rows = [np.pad(p, [(0, 0), (0, 0), (0, longest - p.shape[2]), (0, 0)], constant_values=fill) for p in parts]
    return np.concatenate(rows)


def alone(settings, sequence, length):
    cache, outputs = EvictingKVCache(method(settings)), []
    for start in range(0, length, STEP):
        outputs.append(attend(cache, *(part[:, :, start : min(start + STEP, length)] for part in sequence)))
    for t in range(length, length + N_DECODE):
        outputs.append(attend(cache, *(part[:, :, t : t + 1] for part in sequence)))
    return cache, np.concatenate(outputs, axis=2)


def together(settings, sequences, lengths):
    batch = EvictingKVCache.merge([EvictingKVCache(method(settings)) for _ in lengths])
    outputs = [[] for _ in lengths]
    longest = max(lengths)
    if min(lengths) < longest:
        batch.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    for start in range(0, longest, STEP):
        stops = [min(start + STEP, length) for length in lengths]
        blocks = [
            [s[i][:, :, start : max(start, stop)] for s, stop in zip(sequences, stops, strict=True)] for i in range(3)
        ]
        # Whatever stands behind the real tokens, NaN too, must reach nobody.
        output = attend(batch, *(padded(block, fill) for block, fill in zip(blocks, (np.nan, np.nan, 0), strict=True)))
        for b, stop in enumerate(stops):
            outputs[b].append(output[b : b + 1, :, : max(0, stop - start)])
    batch.finalize()
    for t in range(N_DECODE):
        token = (
            np.concatenate([s[i][:, :, n + t : n + t + 1] for s, n in zip(sequences, lengths, strict=True)])
            for i in range(3)
        )
        output = attend(batch, *token)
        for b in range(len(lengths)):
            outputs[b].append(output[b : b + 1])
    return batch, [np.concatenate(parts, axis=2) for parts in outputs]


def assert_same(one, other):
    assert one.offset == other.offset
    for a, b in zip(
        (*kv(one.record), kept_positions(one.record)), (*kv(other.record), kept_positions(other.record)), strict=True
    ):
        np.testing.assert_array_equal(np.array(a), np.array(b))


@every_method
@pytest.mark.parametrize(
    "lengths", [(5, 40, 90), (33, 31, 20), (1, 2, 3), (90, 100, 60), (37, 74, 74), (32, 32, 32)], ids=str
)
def test_a_ragged_batch_keeps_what_its_rows_would_keep_alone(settings, lengths):
    sequences = [drawn(n + N_DECODE, seed) for seed, n in enumerate(lengths)]
    batch, outputs = together(settings, sequences, list(lengths))
    assert batch.offset.tolist() == [n + N_DECODE for n in lengths]
    for b, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        cache, output = alone(settings, sequence, length)
        assert_same(batch.extract(b), cache)
        np.testing.assert_allclose(outputs[b], output, atol=1e-6)


@every_method
def test_caches_at_different_fill_levels_merge_and_go_on_as_alone(settings):
    # 5 rows, and far over budget with a landing row
    sequences = [drawn(120, seed) for seed in range(3)]
    caches, fresh = [], []
    for group in (caches, fresh):
        for sequence, calls in zip(sequences, ([5], [50, 1, 1], [33]), strict=True):
            cache = EvictingKVCache(method(settings))
            for n_tokens in calls:
                start = cache.offset
                attend(cache, *(part[:, :, start : start + n_tokens] for part in sequence))
            group.append(cache)
    starts = [cache.offset for cache in caches]
    batch = EvictingKVCache.merge(caches)
    for n_tokens in (1, 1, 6, 1, 30, 1):
        token = [
            np.concatenate([s[i][:, :, n : n + n_tokens] for s, n in zip(sequences, starts, strict=True)])
            for i in range(3)
        ]
        together_output = attend(batch, *token)
        for b, cache in enumerate(fresh):
            output = attend(cache, *(part[b : b + 1] for part in token))
            np.testing.assert_allclose(together_output[b : b + 1], output, atol=1e-6)
        starts = [n + n_tokens for n in starts]
    for b, cache in enumerate(fresh):
        assert_same(batch.extract(b), cache)


@every_method
def test_rows_that_leave_and_join_do_not_disturb_the_others(settings):
    sequences = [drawn(100, seed) for seed in range(3)]
    first = [EvictingKVCache(method(settings)) for _ in range(3)]
    for cache, sequence, n in zip(first, sequences, (60, 3, 20), strict=True):
        attend(cache, *(part[:, :, :n] for part in sequence))
    batch = EvictingKVCache.merge(first[:2])
    batch.extend(EvictingKVCache.merge(first[2:]))
    batch.filter([2, 0])
    assert batch.offset.tolist() == [20, 60]
    assert_same(batch.extract(0), first[2])
    assert_same(batch.extract(1), first[0])


def test_filtering_the_long_rows_away_gives_their_room_back():
    batch = EvictingKVCache.merge([EvictingKVCache(method({"filters": FILTERS})) for _ in range(2)])
    batch.prepare(lengths=[4, 30], right_padding=[26, 0])
    attend(batch, *(np.zeros((2, *shape), np.float32) for shape in ((H, 30, D), (H, 30, D_V), (2 * H, 30, D))))
    batch.finalize()
    batch.filter([0])
    assert batch.size() == 4


def test_a_batch_that_all_rows_have_left_takes_new_ones_in():
    used = alone({"filters": FILTERS}, drawn(60 + N_DECODE, seed=4), 60)[0]
    batch = EvictingKVCache.merge([used, used])
    batch.filter([])
    assert batch.empty()
    batch.extend(used)
    assert_same(batch.extract(0), used)


def test_a_row_that_has_seen_nothing_extracts_as_an_empty_cache():
    batch = EvictingKVCache.merge([EvictingKVCache(method({"filters": FILTERS})) for _ in range(2)])
    assert batch.extract(1).empty()


def test_settings_and_filters_survive_merge_and_extract():
    one = EvictingKVCache(method({"filters": FILTERS, "recent": 7}))
    attend(one, *drawn(40, 0))
    again = EvictingKVCache.merge([one, one]).extract(1)
    assert dict(again.method.settings) == dict(one.method.settings)
    np.testing.assert_array_equal(np.array(again.method.params["filters"]), np.array(FILTERS))
    np.testing.assert_array_equal(np.array(again.record.filters), np.array(one.record.filters))


def test_a_frozen_filter_of_the_fallback_survives_merge_and_extract():
    one = EvictingKVCache(method({"calib_tokens": 20}))
    attend(one, *drawn(40, 0))
    batch = EvictingKVCache.merge([EvictingKVCache(method({"calib_tokens": 20})), one])
    np.testing.assert_array_equal(np.array(batch.extract(1).record.filters), np.array(one.record.filters))


def test_a_padded_prefill_ends_the_warm_up_once_every_row_has_its_filter():
    # Otherwise each later token would estimate the filters again.
    batch = EvictingKVCache.merge([EvictingKVCache(method({"calib_tokens": 20})) for _ in range(2)])
    batch.prepare(lengths=[25, 30], right_padding=[5, 0])
    attend(batch, *(np.concatenate(parts) for parts in zip(drawn(30, 0), drawn(30, 1), strict=True)))
    batch.finalize()
    assert batch.record.frozen
    assert batch.record.store.warming_up == 0


def test_a_bfloat16_batch_that_an_empty_cache_joins_stays_bfloat16():
    one = EvictingKVCache(method({"filters": FILTERS}))
    one.update_and_fetch(*(mx.array(part).astype(mx.bfloat16) for part in drawn(5, 0)[:2]))
    batch = EvictingKVCache.merge([one])
    batch.extend(EvictingKVCache.merge([EvictingKVCache(method({"filters": FILTERS}))]))
    assert [part.dtype for part in kv(batch.record)] == [mx.bfloat16, mx.bfloat16]


def test_tokens_that_a_ragged_batch_takes_back_leave_nothing_behind():
    # They may turn into padding, and a NaN under a mask poisons attention all the same.
    batch = EvictingKVCache.merge([EvictingKVCache(method({"filters": FILTERS})) for _ in range(2)])
    batch.prepare(lengths=[2, 5], right_padding=[3, 0])
    keys, values, queries = (np.concatenate(parts) for parts in zip(drawn(5, 0), drawn(5, 1), strict=True))
    keys[0, :, 1], values[0, :, 1] = np.nan, np.nan
    attend(batch, keys, values, queries)
    batch.finalize()
    batch.trim(1)
    assert not np.isnan(
        attend(batch, *(np.ones((2, *s), np.float32) for s in ((H, 1, D), (H, 1, D_V), (2 * H, 1, D))))
    ).any()


def test_batches_in_lockstep_merge_row_by_row():
    one = EvictingKVCache(method({"filters": FILTERS}))
    attend(one, *(np.concatenate(parts) for parts in zip(drawn(40, 0), drawn(40, 1), strict=True)))
    other = EvictingKVCache(method({"filters": FILTERS}))
    attend(other, *drawn(7, 2))
    batch = EvictingKVCache.merge([one, other])
    assert batch.offset.tolist() == [40, 40, 7]
    assert_same(batch.extract(2), other)


def test_values_keep_a_type_of_their_own_beside_an_empty_side():
    method = qfilters(budget=16, n_sink=2, filters=mx.ones((2, 8)))
    keys, values = mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 3, 8), mx.float16)
    used = EvictingKVCache(method)
    used.update_and_fetch(keys, values)
    batch = EvictingKVCache.merge([EvictingKVCache(method), used])
    view = batch.update_and_fetch(mx.ones((2, 2, 1, 8)), mx.ones((2, 2, 1, 8), mx.float16))
    assert [part.dtype for part in view] == [mx.float32, mx.float16]


def test_a_batch_in_lockstep_can_be_filtered_and_its_rows_extracted():
    cache = EvictingKVCache(qfilters(budget=6, n_sink=1, filters=mx.ones((1, 4))))
    keys = mx.random.normal((3, 1, 10, 4), key=mx.random.key(0))
    cache.update_and_fetch(keys, keys)
    row = cache.extract(2)
    assert row.offset == 10
    assert mx.array_equal(kv(row.record)[0], kv(cache.record)[0][2:])
    cache.filter([2, 0])
    assert cache.offset == 10
    assert mx.array_equal(kv(cache.record)[0][:1], kv(row.record)[0])

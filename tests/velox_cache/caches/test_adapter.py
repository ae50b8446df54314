"""EvictingKVCache for one sequence: offsets, rows, accounting, masks, refusals."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import EvictingKVCache, KVCacheConfig, QFiltersKVCache
from velox_fn import arrays, kept_positions, qfilters

H, D, D_V = 2, 8, 6


def block(n_tokens, seed=0, batch=1):
    rng = np.random.default_rng(seed)
    return tuple(mx.array(rng.standard_normal((batch, H, n_tokens, dim)).astype(np.float32)) for dim in (D, D_V))


def cache(**settings):
    return EvictingKVCache(qfilters(**{"budget": 16, "n_sink": 2, "filters": mx.ones((H, D))} | settings))


def fed(one, calls, seed=0):
    for i, n_tokens in enumerate(calls):
        one.update_and_fetch(*block(n_tokens, seed + i))
    return one


@pytest.mark.parametrize("prefill", [[200], [64, 64, 64, 8], [1] * 200], ids=["at once", "chunked", "one by one"])
def test_offset_is_320_after_200_tokens_of_prefill_and_120_of_decode(prefill):
    one = fed(cache(budget=64), [*prefill, *[1] * 120])
    assert one.offset == 320
    assert one.size() == 64


def test_offset_of_one_sequence_is_a_python_int():
    assert type(fed(cache(), [3]).offset) is int


def test_an_offset_that_was_read_does_not_change():
    batch = EvictingKVCache.merge([fed(cache(), [3]), fed(cache(), [5])])
    before = batch.offset
    batch.update_and_fetch(*block(2, batch=2))
    assert (before.tolist(), batch.offset.tolist()) == ([3, 5], [5, 7])


def test_size_counts_rows_and_tokens_seen_counts_tokens():
    one = fed(cache(), [30, *[1] * 10])
    assert (one.size(), one.tokens_seen, one.tokens_kept) == (16, 40, 16)


def test_nothing_is_evicted_within_budget():
    one = fed(cache(), [10, 1, 5])
    assert np.array(kept_positions(one.record))[0].tolist() == [list(range(16))] * H


def test_accounting_of_a_used_cache():
    one = QFiltersKVCache(KVCacheConfig(qfilters_budget=16), filters=mx.ones((H, D)))
    for part in (block(30), block(10)):
        one.update_and_fetch(*(half.astype(mx.float16) for half in part))
    assert one.qfilters_kept_bytes == H * (16 * (D + D_V) * 2 + D * 4)  # rows in their dtype, filters in float32
    assert one.full_seq_bytes == H * 40 * (D + D_V) * 2
    assert one.compression_ratio == one.full_seq_bytes / one.qfilters_kept_bytes


def test_accounting_of_an_empty_cache():
    one = cache()
    assert (one.size(), one.tokens_seen, one.tokens_kept, one.nbytes, one.full_seq_bytes) == (0, 0, 0, 0, 0)
    assert one.compression_ratio == 1.0
    assert one.empty()


def test_accounting_of_a_batch_in_lockstep_counts_every_sequence():
    one = cache()
    one.update_and_fetch(*block(40, batch=3))
    assert one.full_seq_bytes == 3 * H * 40 * (D + D_V) * 4
    assert one.kept_bytes == 3 * H * (16 * (D + D_V) + D) * 4


def test_nbytes_counts_the_landing_row():
    one = fed(cache(), [30, 1])
    assert one.nbytes == sum(leaf.nbytes for leaf in arrays(one.record))
    assert one.record.store.keys.shape[2] >= 17


def test_the_last_view_can_be_read_again():
    one = cache()
    view = one.update_and_fetch(*block(30))
    assert one.keys_and_values() is view


def test_there_is_no_view_before_the_first_call():
    with pytest.raises(ValueError, match="call update_and_fetch first"):
        cache().keys_and_values()


def test_state_can_be_read_during_prefill_and_changes_nothing():
    read, unread = cache(), cache()
    for i, n_tokens in enumerate([20, 20, 1, 1]):
        mx.eval(read.state)
        read.update_and_fetch(*block(n_tokens, i))
        unread.update_and_fetch(*block(n_tokens, i))
        mx.eval(read.state)
    assert kept_positions(read.record).tolist() == kept_positions(unread.record).tolist()


def test_state_is_a_flat_tuple_of_one_string_and_arrays():
    for one in (cache(), fed(cache(), [30, 1])):
        header, *leaves = one.state
        assert isinstance(header, str)
        assert all(isinstance(leaf, mx.array) for leaf in leaves)


def test_a_state_of_another_method_is_refused():
    with pytest.raises(ValueError, match="use from_state"):
        cache(budget=17).state = fed(cache(), [30]).state


@pytest.mark.parametrize("broken", [(), ("{}",), ("no json",), (None,), (mx.zeros(3),), ('{"format": 99}',)], ids=repr)
def test_what_is_no_state_is_refused(broken):
    with pytest.raises(ValueError, match=r"velox|Velox"):
        EvictingKVCache.from_state(broken)


def test_a_state_that_lacks_arrays_is_refused():
    with pytest.raises(ValueError, match=r"truncated|arrays"):
        EvictingKVCache.from_state(fed(cache(), [30]).state[:-1])


@pytest.mark.parametrize("leaf", [2, -2], ids=["keys", "filters"])
def test_a_state_whose_arrays_have_other_dimensions_is_refused(leaf):
    packed = list(fed(cache(), [30]).state)
    packed[leaf] = packed[leaf][0]
    with pytest.raises(ValueError, match="are not those of qfilters here"):
        EvictingKVCache.from_state(packed)


@pytest.mark.parametrize(
    ("written", "altered"),
    [('"budget": 16, "n_sink"', '"budget": 99, "n_sink"'), ('"filled": 16', '"filled": 99'), ("[30]", "[30, 2]")],
    ids=["budget", "filled", "offsets"],
)
def test_a_state_whose_header_contradicts_its_rows_is_refused(written, altered):
    header, *arrays = fed(cache(), [30]).state
    assert written in header
    with pytest.raises(ValueError, match="contradicts"):
        EvictingKVCache.from_state((header.replace(written, altered, 1), *arrays))


def test_500_tokens_of_decode_take_no_more_memory_than_100():
    one, held = cache(budget=64), []
    for t in range(500):
        view = one.update_and_fetch(*block(1, t))
        mx.eval(view)
        del view
        if t in (100, 499):
            held.append(mx.get_active_memory())
    assert held[1] <= held[0] + 4096


def test_a_step_over_budget_does_not_copy_the_cache():
    # A field of the adapter that held the old record would make every step a copy.
    one = EvictingKVCache(qfilters(budget=1024, filters=mx.ones((4, 64))))
    keys = mx.random.normal((1, 4, 1030, 64), key=mx.random.key(0))
    mx.eval(one.update_and_fetch(keys, keys))
    for _ in range(3):
        mx.eval(one.update_and_fetch(keys[:, :, :1], keys[:, :, :1]))
    mx.eval(one.state)
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    for _ in range(10):
        mx.eval(one.update_and_fetch(keys[:, :, :1], keys[:, :, :1]))
    assert mx.get_peak_memory() - held < 2 * 4 * 1024 * 64 * 4 / 4


# Masks


def test_one_token_needs_no_mask():
    assert fed(cache(), [30]).make_mask(1) is None
    assert fed(cache(), [30]).make_mask(1, return_array=True) is None


def test_a_block_gets_the_causal_mask():
    assert fed(cache(), [30]).make_mask(5) == "causal"


def test_a_mask_array_has_the_kept_rows_in_front_of_the_triangle():
    for calls in ([], [5], [30], [30, 1]):
        one = fed(cache(), calls)
        mask = one.make_mask(4, return_array=True)
        n = one.size()
        assert mask.dtype == mx.bool_
        np.testing.assert_array_equal(np.array(mask), np.tri(4, n + 4, n, dtype=bool))
        assert one.update_and_fetch(*block(4))[0].shape[2] == n + 4


# Refusals


@pytest.mark.parametrize("calls", [[], [5], [30, 1]], ids=["empty", "within budget", "over budget"])
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((1, H, 3, D), (1, H, 2, D_V)),
        ((1, H, 3, D), (2, H, 3, D_V)),
        ((1, H, 0, D), (1, H, 0, D_V)),
        ((H, 3, D), (H, 3, D_V)),
        ((3, D), (3, D_V)),
        ((), ()),
        ((1, H + 1, 3, D), (1, H + 1, 3, D_V)),
        ((1, H, 3, D + 1), (1, H, 3, D_V)),
    ],
    ids=str,
)
def test_a_block_that_does_not_fit_is_refused_and_nothing_is_lost(calls, keys, values):
    one = fed(cache(), calls)
    before = None if one.empty() else kept_positions(one.record).tolist()
    with pytest.raises(ValueError, match=r"keys|state|filters"):
        one.update_and_fetch(mx.zeros(keys), mx.zeros(values))
    assert one.offset == sum(calls)
    assert before == (None if one.empty() else kept_positions(one.record).tolist())


def test_a_batch_size_that_changes_is_refused():
    with pytest.raises(ValueError, match="batch size changed from 1 to 2"):
        fed(cache(), [5]).update_and_fetch(*block(1, batch=2))


def test_a_merged_batch_refuses_another_number_of_rows():
    batch = EvictingKVCache.merge([cache(), cache()])
    with pytest.raises(ValueError, match="a batch of 2 sequences, got keys for 3"):
        batch.update_and_fetch(*block(4, batch=3))


def test_filters_of_another_layout_are_refused_at_the_first_update():
    one = EvictingKVCache(qfilters(budget=16, filters=mx.ones((H + 1, D))))
    with pytest.raises(ValueError, match=r"filters must be \[n_kv_heads, head_dim\] = \(2, 8\)"):
        one.update_and_fetch(*block(3))
    assert one.empty()


def test_lengths_for_another_number_of_rows_are_refused():
    batch = EvictingKVCache.merge([cache(), cache()])
    with pytest.raises(ValueError, match="3 entries for a batch of 2 sequences"):
        batch.prepare(lengths=[3, 2, 1], right_padding=[0, 1, 2])


def test_a_named_cache_of_another_method_is_refused():
    with pytest.raises(ValueError, match="needs method='qfilters', got 'h2o'"):
        QFiltersKVCache(KVCacheConfig(method="h2o"))


def test_caches_of_other_settings_do_not_share_a_batch():
    with pytest.raises(ValueError, match="one method with one set of settings"):
        EvictingKVCache.merge([cache(), cache(budget=17)])
    with pytest.raises(ValueError, match="one method with one set of settings"):
        EvictingKVCache.merge([cache(), cache(filters=2 * mx.ones((H, D)))])


def test_arrays_that_are_no_floats_are_refused():
    with pytest.raises(ValueError, match=r"must be float32, float16 or bfloat16, got mlx\.core\.int32"):
        cache().update_and_fetch(*(part.astype(mx.int32) for part in block(3)))

"""Going back: exact or refused, never silently wrong."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_cache import EvictingKVCache
from velox_fn import kept_positions, kv, qfilters

H, D = 2, 8
FILTERS = mx.array(np.random.default_rng(1).standard_normal((H, D)).astype(np.float32))
TOKENS = mx.array(np.random.default_rng(0).standard_normal((1, H, 400, D)).astype(np.float32))


def cache(**settings):
    return EvictingKVCache(qfilters(**{"budget": 12, "n_sink": 2, "filters": FILTERS} | settings))


def feed(one, tokens):
    """Take in these token indices in one call; what the block may attend to, as sorted rows."""
    block = mx.take(TOKENS, mx.array(list(tokens)), axis=2)
    return [sorted(row.tobytes() for row in head) for head in np.array(one.update_and_fetch(block, block)[0])[0]]


def assert_same(one, other):
    assert one.offset == other.offset
    assert kept_positions(one.record).tolist() == kept_positions(other.record).tolist()
    for a, b in zip(kv(one.record), kv(other.record), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


@given(
    recent=st.sampled_from([0, 3]),
    rollback=st.integers(1, 5),
    rounds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=10),
    prompt=st.sampled_from([3, 12, 13, 17, 40]),
    source=st.sampled_from([{"filters": FILTERS}, *({"filters": None, "calib_tokens": n} for n in (8, 15, 19, 41))]),
)
@settings(max_examples=80)
def test_rollback_equals_having_seen_only_the_accepted_tokens(recent, rollback, rounds, prompt, source):
    # As speculative decoding does: draft some tokens, take the refused ones back, go on.
    speculating = cache(recent=recent, rollback=rollback, **source)
    accepted = list(range(prompt))
    feed(speculating, accepted)
    drawn = prompt
    for drafted, refused in rounds:
        refused = min(refused, drafted, rollback)
        draft = list(range(drawn, drawn + drafted))
        drawn += drafted
        feed(speculating, draft)
        assert speculating.trim(refused) == refused
        accepted += draft[: drafted - refused]
        plain = cache(recent=recent, rollback=rollback, **source)
        feed(plain, accepted)
        assert_same(speculating, plain)


def test_a_view_after_a_rollback_is_that_of_the_accepted_tokens():
    one, other = cache(rollback=4), cache(rollback=4)
    feed(one, range(40))
    one.trim(4)
    feed(other, range(36))
    assert feed(one, [50, 51]) == feed(other, [50, 51])


def test_a_rollback_cache_keeps_what_one_without_keeps():
    one, other = cache(recent=3, rollback=5), cache(recent=3)
    for calls in ([20], [1], [1], [7]):
        for each in (one, other):
            feed(each, range(each.offset, each.offset + calls[0]))
        assert_same(one, other)


def test_rollback_beyond_what_is_kept_aside_raises_and_changes_nothing():
    one = cache(rollback=3)
    feed(one, range(40))
    with pytest.raises(ValueError, match=r"cannot take back 4 tokens.*rollback=4 or more"):
        one.trim(4)
    assert one.offset == 40
    assert one.trim(3) == 3
    with pytest.raises(ValueError, match="0 can be taken back"):
        one.trim(1)


def test_what_can_be_taken_back_survives_a_round_trip_and_an_extract():
    one = cache(rollback=3)
    feed(one, range(40))
    one.trim(2)
    for again in (EvictingKVCache.from_state(one.state), EvictingKVCache.merge([one]).extract(0)):
        with pytest.raises(ValueError, match="cannot take back 2 tokens"):
            again.trim(2)


def test_rollback_after_merge_and_extract_is_exact():
    one, plain = cache(rollback=3), cache(rollback=3)
    feed(one, range(40))
    batch = EvictingKVCache.merge([one, cache(rollback=3)])
    block = mx.broadcast_to(TOKENS[:, :, 40:43], (2, H, 3, D))
    batch.update_and_fetch(block, block)
    alone = batch.extract(0)
    assert alone.trim(3) == 3
    feed(plain, range(40))
    assert_same(alone, plain)


def test_a_batch_takes_back_nothing_from_before_it():
    one = cache(rollback=3)
    feed(one, range(40))
    batch = EvictingKVCache.merge([one, one])
    with pytest.raises(ValueError, match=r"cannot take back 1 tokens.*and 0 can be"):
        batch.trim(1)


def test_trim_of_0_tokens_changes_nothing():
    one = cache(rollback=3)
    feed(one, range(40))
    assert one.trim(0) == 0
    assert one.offset == 40


def test_trim_before_the_first_eviction_is_exact():
    one, plain = cache(), cache()
    feed(one, range(12))
    assert one.is_trimmable()
    assert one.trim(5) == 5
    feed(plain, range(7))
    assert_same(one, plain)


@pytest.mark.parametrize("n", [-1, 1.5])
def test_what_is_no_number_of_tokens_is_refused(n):
    one = cache()
    feed(one, range(5))
    with pytest.raises(ValueError, match="n must be"):
        one.trim(n)
    assert (one.offset, one.size()) == (5, 5)


def test_trim_takes_back_no_more_tokens_than_there_are():
    one = cache()
    feed(one, range(7))
    assert one.trim(100) == 7
    assert one.offset == 0


@pytest.mark.parametrize("calls", [[40], [12, 1], [12, 1, 1]], ids=str)
def test_trim_after_eviction_without_rollback_returns_0(calls):
    one = cache()
    for n_tokens in calls:
        feed(one, range(one.offset, one.offset + n_tokens))
    before = kept_positions(one.record).tolist()
    assert not one.is_trimmable()
    assert one.trim(2) == 0
    assert kept_positions(one.record).tolist() == before


def test_trim_inside_the_fallbacks_warm_up_is_exact_though_it_is_over_budget():
    one, plain = cache(filters=None, calib_tokens=30), cache(filters=None, calib_tokens=30)
    feed(one, range(25))
    assert one.trim(5) == 5
    feed(plain, range(20))
    assert_same(one, plain)


@pytest.mark.parametrize("calls", [[26, 5], [31], [29, 1, 1], [30, 1, 2, 1], [26, 7], [26, 8]], ids=str)
@pytest.mark.parametrize("taken_back", [1, 4])
@pytest.mark.parametrize("budget", [12, 29, 40])
def test_rollback_across_the_end_of_the_fallbacks_warm_up_is_exact(calls, taken_back, budget):
    # The filter comes from the first 30 keys: those that stay decide, whatever stood in their place before.
    made = {"filters": None, "calib_tokens": 30, "rollback": 4, "budget": budget}
    one, plain = cache(**made), cache(**made)
    for n_tokens in calls:
        feed(one, range(one.offset, one.offset + n_tokens))
    assert one.trim(taken_back) == taken_back
    feed(plain, range(one.offset))
    assert_same(one, plain)
    for block in ([100], [101, 102, 103], [104], range(105, 125), [125]):
        assert feed(one, block) == feed(plain, block)
        assert_same(one, plain)


def test_a_rollback_to_where_nothing_was_evicted_can_be_followed_by_a_whole_one():
    one, plain = cache(rollback=4), cache(rollback=4)
    feed(one, range(14))
    one.trim(4)
    feed(one, range(10, 13))
    assert one.trim(4) == 4
    feed(plain, range(9))
    assert_same(one, plain)


def test_rows_held_for_a_rollback_into_the_warm_up_leave_once_none_can_lead_there():
    one = cache(filters=None, calib_tokens=30, rollback=4)
    feed(one, range(33))
    assert (one.size(), one.record.store.filled) == (12, 33)
    feed(one, [33])
    assert (one.size(), one.record.store.filled) == (12, 16)


def test_trim_below_the_fallbacks_calibration_within_budget_estimates_the_filter_again():
    one, plain = cache(filters=None, calib_tokens=8), cache(filters=None, calib_tokens=8)
    feed(one, range(11))
    one.trim(5)
    feed(one, range(100, 120))
    feed(plain, [*range(6), *range(100, 120)])
    assert_same(one, plain)


def test_a_ragged_batch_that_still_warms_up_refuses_rollback():
    batch = EvictingKVCache.merge([cache(filters=None, rollback=3), cache(filters=None, rollback=3)])
    block = mx.broadcast_to(TOKENS[:, :, :3], (2, H, 3, D))
    with pytest.raises(ValueError, match="cannot warm up with rollback=3"):
        batch.update_and_fetch(block, block)

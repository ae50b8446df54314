"""Sequences of up to 2^31 - 1 tokens: age is exact at every position, and then there is an error."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import EvictingKVCache
from velox_fn import METHODS, fusion, kept_positions, l2norm, learned, streaming_llm
from velox_fn.engine.select import rank_positions
from velox_fn.registry import BUILT_IN

MOST = 2**31 - 1
PLACES = [0, 2**24 - 3, 2**24 + 5, 2**30 - 7, MOST - 2**24 - 9, MOST - 15]


def moments(n_terms):
    return {"means": mx.full((1, n_terms), 300.0), "deviations": mx.full((1, n_terms), 7.0)}


def fitted():
    of_keys, of_values = mx.array([[0.7, -31.3]]), mx.array([[1e-3, 1e-4]])
    rows = {"score_keys": of_keys, "score_key_squares": 0 * of_keys, "score_values": of_values}
    return {**rows, "score_value_squares": -of_values, "score_age": mx.array([0.37])}


BY_AGE = {
    "streaming_llm": lambda: streaming_llm(budget=6, n_sink=1),
    "recency": lambda: fusion(budget=6, n_sink=1, terms="recency", **moments(1)),
    "a sum with recency": lambda: fusion(budget=6, n_sink=1, terms="key_norm+recency", **moments(2)),
    "learned": lambda: learned(budget=6, n_sink=1, **fitted()),
    "the larger of two": lambda: fusion(budget=6, n_sink=1, terms="recency+value_norm", combine="max", **moments(2)),
}


def begun(method, seen):
    """A state whose first token comes at position `seen`."""
    empty = method.init(1, 1, 2, 2)
    store = dataclasses.replace(empty.store, offset=mx.array([seen], mx.int32), seen_by_all=seen)
    return dataclasses.replace(empty, store=store)


def block(n_tokens):
    return mx.ones((1, 1, n_tokens, 2))


@pytest.mark.parametrize("seen", PLACES)
@pytest.mark.parametrize("name", BY_AGE)
def test_of_rows_that_differ_in_age_alone_the_newest_stay(name, seen):
    method = BY_AGE[name]()
    state = begun(method, seen)
    for n_tokens in (9, 1, 1, 4):
        state, _ = method.update(state, block(n_tokens), block(n_tokens))
    newest = range(seen + 9, seen + 15) if seen else [0, *range(10, 15)]
    assert kept_positions(state).tolist() == [[list(newest)]]


@pytest.mark.parametrize("name", ["streaming_llm", "recency"])
def test_any_two_positions_are_in_order(name):
    rng = np.random.default_rng(0)
    near = rng.integers(1, MOST, 60)
    positions = rng.permutation(
        np.unique([*near, *(near + 1).clip(1, MOST - 1), 2**24, 2**24 + 1, MOST - 2, MOST - 1])
    ).tolist()
    method = BY_AGE[name]()
    arrived = [method.scored(method.update(begun(method, at), block(1), block(1))[0]) for at in positions]
    ranks = mx.concatenate([state.store.ranks[0, 0, :1] for state in arrived])
    assert rank_positions(ranks).tolist() == positions
    assert rank_positions(mx.sort(ranks)).tolist() == sorted(positions)


COUNTING = [name for name, method in BUILT_IN.items() if not method.needs_calibration and name != "expected_attention"]


@pytest.mark.parametrize("name", COUNTING)
def test_the_token_past_the_last_countable_one_is_refused(name):
    method = METHODS[name](budget=64)
    state, _ = method.update(begun(method, MOST - 1), block(1), block(1))
    with pytest.raises(ValueError, match=r"2\*\*31 - 1.*start again"):
        method.update(state, block(1), block(1))
    with pytest.raises(ValueError, match=r"2\*\*31 - 1.*start again"):
        method.update(begun(method, MOST - 3), block(4), block(4))


def test_the_longest_sequence_of_a_batch_counts():
    caches = []
    for seen in (0, MOST - 3):
        method = l2norm(budget=8)
        cache = EvictingKVCache(method)
        cache.update_and_fetch(block(2), block(2))
        rows = cache._held.rows
        store = dataclasses.replace(rows.store, offset=mx.array([seen + 2], mx.int32), seen_by_all=seen + 2)
        rows = dataclasses.replace(rows.with_store(store), offsets=(seen + 2,))
        cache._held = dataclasses.replace(cache._held, rows=rows)
        caches.append(cache)
    batch = EvictingKVCache.merge(caches)
    two = mx.ones((2, 1, 1, 2))
    batch.update_and_fetch(two, two)
    with pytest.raises(ValueError, match=r"2\*\*31 - 1.*has seen 2147483647"):
        batch.update_and_fetch(two, two)
    assert batch.offset.tolist() == [3, MOST]

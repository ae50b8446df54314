"""Rows that come one by one within the budget are scored later, many at once, and nobody can tell."""

import json

import mlx.core as mx
import numpy as np
import pytest
from cases import BUDGET, STATIC

from velox_cache import EvictingKVCache
from velox_fn import arrays, kept_positions, kv
from velox_fn.engine.store import used_rows
from velox_fn.testing import bits, block, fed

ROWS = BUDGET - 2
PUTTING_OFF = [case for case in STATIC if not case.warm_up]
every_method_that_puts_off = pytest.mark.parametrize("case", PUTTING_OFF, ids=str)


def one_by_one(method, tokens):
    state = fed(method, tokens, [1] * tokens[0].shape[2])
    assert state.store.unscored > 0
    return state


@every_method_that_puts_off
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_ranks_made_later_have_the_bits_of_those_made_at_once(case, dtype):
    tokens, method = block(ROWS, batch=2, dtype=dtype), case.make()
    tokens[0][:, :, 5, 2] = mx.nan
    later, at_once = method.scored(one_by_one(method, tokens)), fed(method, tokens, [ROWS])
    np.testing.assert_array_equal(bits(used_rows(later.store).ranks), bits(used_rows(at_once.store).ranks))
    assert later.store.offset.tolist() == at_once.store.offset.tolist()


@every_method_that_puts_off
def test_scoring_later_leaves_the_state_as_it_was(case):
    method = case.make()
    state = one_by_one(method, block(ROWS))
    before = [bits(leaf).copy() for leaf in arrays(state)]
    scored = method.scored(state)
    mx.eval(arrays(scored), method.update(scored, *block(30, seed=1)[:2])[1])
    for leaf, old in zip(arrays(state), before, strict=True):
        np.testing.assert_array_equal(bits(leaf), old)


@every_method_that_puts_off
def test_kept_rows_and_positions_do_not_wait_for_ranks(case):
    tokens = block(ROWS, batch=2)
    state = one_by_one(case.make(), tokens)
    np.testing.assert_array_equal(np.array(kv(state)[0]), np.array(tokens[0]))
    np.testing.assert_array_equal(np.array(kv(state)[1]), np.array(tokens[1]))
    assert (np.array(kept_positions(state)) == np.arange(ROWS)).all()


def test_ranks_that_are_not_there_are_never_read():
    state = one_by_one(PUTTING_OFF[0].make(), block(ROWS))
    with pytest.raises(ValueError, match="no rank yet"):
        used_rows(state.store)


@every_method_that_puts_off
@pytest.mark.parametrize("move", ["trim", "merge", "filter", "extract", "save"])
def test_caches_move_with_rows_that_wait_for_ranks(case, move):
    keys, values, _ = block(60)

    def cache(calls):
        made, start = EvictingKVCache(case.make()), 0
        for n_tokens in calls:
            made.update_and_fetch(keys[:, :, start : start + n_tokens], values[:, :, start : start + n_tokens])
            start += n_tokens
        return made

    def moved(made):
        if move == "trim":
            assert made.trim(3) == 3
        if move in ("merge", "filter", "extract"):
            short = EvictingKVCache(case.make())
            short.update_and_fetch(keys[:, :, :2], values[:, :, :2])
            batch = EvictingKVCache.merge([made, short])
            if move == "filter":
                batch.filter([0])
            return batch.extract(0)
        if move == "save":
            assert json.loads(made.state[0])["record"]["store"]["unscored"] == made.record.store.unscored
            return EvictingKVCache.from_state(made.state)
        return made

    waiting, at_once = moved(cache([1] * ROWS)), moved(cache([ROWS]))
    for made in (waiting, at_once):  # over the budget, where ranks decide
        made.update_and_fetch(keys[:, :, 30:], values[:, :, 30:])
    np.testing.assert_array_equal(np.array(kept_positions(waiting.record)), np.array(kept_positions(at_once.record)))

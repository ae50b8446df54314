"""StreamingLLM keeps both ends."""

import dataclasses

import mlx.core as mx
import pytest
from arm_oracle import kept_after, tokens

from velox_fn import kept_positions, streaming_llm


@pytest.mark.parametrize("calls", [[50], [20, 1, 1, 28], [1] * 50])
def test_the_first_and_the_last_tokens_stay(calls):
    keys, values, _ = tokens(50)
    found = kept_after(streaming_llm(budget=10, n_sink=3), keys, values, None, calls)
    assert found == [[0, 1, 2, *range(43, 50)]] * 2


@pytest.mark.parametrize("seen", [2**24, 2**30])
def test_recency_is_exact_past_the_whole_numbers_of_float32(seen):
    method = streaming_llm(budget=6, n_sink=1)
    empty = method.init(1, 1, 2, 2)
    state = dataclasses.replace(empty, store=dataclasses.replace(empty.store, offset=mx.array([seen], mx.int32)))
    for n_tokens in (9, 1, 1, 4):
        block = mx.ones((1, 1, n_tokens, 2))
        state, _ = method.update(state, block, block)
    assert kept_positions(state).tolist() == [[list(range(seen + 9, seen + 15))]]

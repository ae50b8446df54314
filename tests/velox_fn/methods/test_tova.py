"""TOVA keeps what the last query looks at."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import attention, kept_after, simulated, tokens

from velox_fn import kept_positions, tova


@pytest.mark.parametrize("calls", [[40], [25, 1, 1, 13], [1] * 40])
def test_rows_that_the_last_query_attends_to_most_stay(calls):
    keys, values, queries = tokens(40)
    found = kept_after(tova(budget=10, n_sink=2), keys, values, queries, calls)

    def score(held, old, block):
        last = block[-1:]
        heads = [attention(queries[h, last], last, keys[h // 2], held)[0] for h in range(4)]
        return np.mean(heads, axis=0)

    assert found == [simulated(calls, score, budget=10, n_sink=2)] * 2


def test_all_heads_keep_the_same_tokens_when_a_key_is_not_finite_in_one():
    keys, values, queries = tokens(12)
    keys[0, 7] = 3 * (queries[0, 11] + queries[1, 11])  # the last queries look here in the first head
    keys[1, 7] = np.nan
    found = kept_after(tova(budget=10, n_sink=2), keys, values, queries, [12])
    assert found[0] == found[1]
    assert 7 not in found[0]


def test_padding_is_not_the_last_query():
    keys, values, queries = (mx.array(part[None]) for part in tokens(20))
    method = tova(budget=6, n_sink=1)
    alone, _ = method.update(method.init(1, 2, 8, 6), keys[:, :, :15], values[:, :, :15], queries=queries[:, :, :15])
    padded, _ = method.update(method.init(1, 2, 8, 6), keys, values, queries=queries, valid=mx.array([15]))
    assert kept_positions(padded).tolist() == kept_positions(alone).tolist()


def test_a_sequence_without_new_tokens_keeps_its_rows():
    keys, values, queries = (mx.array(part[None]) for part in tokens(20))
    method = tova(budget=6, n_sink=1)
    state, _ = method.update(method.init(1, 2, 8, 6), keys, values, queries=queries)
    after, _ = method.update(
        state, keys[:, :, :3], values[:, :, :3], queries=queries[:, :, :3], valid=mx.array([0], mx.int32)
    )
    assert kept_positions(after).tolist() == kept_positions(state).tolist()

"""The memory that a block takes to be scored and evicted does not grow with the tokens seen before it."""

import mlx.core as mx
import pytest
from cases import CASES, D_V, Case, D, H

from velox_fn import Eviction, arrays, curdkv, h2o
from velox_fn.testing import block

N_TOKENS, N_BLOCKS = 128, 60
BY_BLOCK = [case for case in CASES if case.arguments.get("granularity") != "token"]  # which is many single steps


@pytest.mark.parametrize("case", BY_BLOCK, ids=str)
def test_peak_memory_of_a_block_is_the_same_however_many_tokens_came_before(case: Case) -> None:
    peaks = peaks_of(case.make(), N_TOKENS, N_BLOCKS)
    # Buffers are freed by other threads, sooner or later: the same work peaks at up to three times the least.
    assert min(peaks[-5:]) <= 3 * max(peaks[1:6])


@pytest.mark.parametrize("method", [h2o(budget=64), curdkv(budget=64)], ids=lambda method: method.name)
def test_peak_memory_of_a_block_that_is_scored_in_parts_is_so_too(method: Eviction) -> None:
    peaks = peaks_of(method, 2048, 8)
    assert min(peaks[-2:]) <= 2 * max(peaks[1:3])


def peaks_of(method: Eviction, n_tokens: int, n_blocks: int) -> list[int]:
    """Bytes at the peak of each update by a block of n_tokens, beside what it starts with."""
    keys, values, queries = block(n_tokens)
    state = method.init(1, H, D, D_V)
    peaks = []
    for _ in range(n_blocks):
        mx.eval(keys, values, queries, arrays(state))
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        state, view = method.update(state, keys, values, queries=queries)
        mx.eval(*view, *arrays(state))
        del view
        peaks.append(mx.get_peak_memory() - held)
    return peaks

"""StreamingLLM keeps both ends."""

import pytest
from arm_oracle import kept_after, tokens

from velox_fn import streaming_llm


@pytest.mark.parametrize("calls", [[50], [20, 1, 1, 28], [1] * 50])
def test_the_first_and_the_last_tokens_stay(calls):
    keys, values, _ = tokens(50)
    found = kept_after(streaming_llm(budget=10, n_sink=3), keys, values, None, calls)
    assert found == [[0, 1, 2, *range(43, 50)]] * 2

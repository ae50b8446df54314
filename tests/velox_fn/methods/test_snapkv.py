"""SnapKV keeps what its observation window votes for."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import attention, kept_after, simulated, tokens

from velox_fn import kept_positions, snapkv

WINDOW, KERNEL = 4, 3


def votes(keys, queries, head, held, block):
    """Weights of the window's queries, averaged over neighbours before the window, and within it."""
    voting = block[-WINDOW:]
    total = sum(attention(queries[h, voting], voting, keys[head], held).sum(0) for h in (2 * head, 2 * head + 1))
    split = sum(position < block[-1] + 1 - WINDOW for position in held)
    return np.concatenate([averaged(part) for part in np.split(total, [split])])


def averaged(part):
    padded = np.pad(part, KERNEL // 2)
    return np.array([padded[i : i + KERNEL].mean() for i in range(len(part))])


@pytest.mark.parametrize("head", [0, 1])
def test_the_window_of_a_prompt_chooses_the_prefix_rows_that_stay(head):
    # The published rule: one prompt, its last queries, the window's rows on top.
    keys, values, queries = tokens(40)
    found = kept_after(snapkv(budget=12, n_sink=0, obs_window=WINDOW, kernel=KERNEL), keys, values, queries, [40])
    prefix = votes(keys, queries, head, list(range(40)), range(40))[:36]
    assert found[head] == sorted([*np.argsort(-prefix)[:8].tolist(), *range(36, 40)])


@pytest.mark.parametrize("calls", [[40], [25, 1, 1, 2, 3, 8], [1] * 40, [40, *[1] * 20]])
def test_old_votes_fade_as_the_window_slides(calls):
    keys, values, queries = tokens(sum(calls))
    method = snapkv(budget=12, n_sink=2, obs_window=WINDOW, kernel=KERNEL)
    found = kept_after(method, keys, values, queries, calls)
    for head in range(2):

        def score(held, old, block, head=head):
            left = max(0.0, 1 - len(block) / WINDOW)
            return left * np.array([old[row] for row in held]) + votes(keys, queries, head, held, block)

        assert found[head] == simulated(calls, score, budget=12, n_sink=2, recent=WINDOW)


def test_padding_does_not_vote():
    keys, values, queries = (mx.array(part[None]) for part in tokens(20))
    method = snapkv(budget=8, n_sink=1, obs_window=WINDOW, kernel=KERNEL)
    alone, _ = method.update(method.init(1, 2, 8, 6), keys[:, :, :15], values[:, :, :15], queries=queries[:, :, :15])
    padded, _ = method.update(method.init(1, 2, 8, 6), keys, values, queries=queries, valid=mx.array([15]))
    assert kept_positions(padded).tolist() == kept_positions(alone).tolist()


@pytest.mark.parametrize("setting", [{"obs_window": 0}, {"kernel": 4}, {"kernel": 0}, {"budget": 36}])
def test_settings_that_cannot_work_are_refused(setting):
    with pytest.raises(ValueError, match="|".join(setting)):
        snapkv(**setting)

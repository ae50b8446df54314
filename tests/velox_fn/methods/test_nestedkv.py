"""NestedKV against its formula, written out row by row in float64."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, simulated, tokens

from velox_fn import nestedkv
from velox_fn.methods.nestedkv import _in_order


def anomaly(key, keys):
    mean = keys.mean(0)
    return -(key @ mean) / (np.linalg.norm(key) * np.linalg.norm(mean))


def brought_to_one(numbers):
    span = numbers.max() - numbers.min()
    return (numbers - numbers.min()) / span if span > 1e-5 else 0 * numbers


def formula(keys):
    unit = keys.astype(np.float64)
    unit = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
    n, whole = len(unit), unit.mean(0, keepdims=True)
    width = min(max(n // 32, 128), 256)
    scales = np.array(
        [
            brought_to_one(np.array([anomaly(unit[i], whole) for i in range(n)])),
            brought_to_one(np.array([anomaly(unit[i], unit[i // width * width :][:width]) for i in range(n)])),
            brought_to_one(np.array([anomaly(unit[i], unit[max(i - 63, 0) : i + 1]) for i in range(n)])),
        ]
    )
    tenth, in_order = max(n // 10, 1), np.sort(scales)
    weights = np.array([0.4, 0.4, 0.2]) * np.exp(3 * (in_order[:, -tenth:].mean(1) - in_order[:, :tenth].mean(1)))
    blend = (weights[:, None] * scales).sum(0) / weights.sum()
    surprise = brought_to_one(scales.std(0))
    gate = 1 / (1 + np.exp(-10 * (surprise - surprise.mean() - 0.6)))
    return (1 - gate) * blend + gate * scales.max(0)


def keys_of_topics(n_tokens, seed=0):
    """Keys around a direction that changes every 90 tokens, so that the three scales are apart."""
    keys, values, _ = tokens(n_tokens, seed)
    topics = np.random.default_rng(seed).standard_normal((2, n_tokens // 90 + 1, 8)).astype(np.float32)
    return keys + 1.5 * topics[:, np.arange(n_tokens) // 90], values


@pytest.mark.parametrize(
    ("calls", "budget"), [([60], 14), ([40, 1, 1, 1, 17], 14), ([400], 150), ([300, 1, 99, 1, 1], 250)], ids=str
)
def test_the_order_is_that_of_the_formula(calls, budget):
    keys, values = keys_of_topics(sum(calls))
    found = kept_after(nestedkv(budget=budget, n_sink=2, recent=3), keys, values, None, calls)
    for head in range(2):

        def score(held, old, block, head=head):
            return formula(keys[head, held])

        assert found[head] == simulated(calls, score, budget=budget, n_sink=2, recent=3)


def test_blocks_are_a_thirty_second_of_a_long_text():
    keys = keys_of_topics(4500)[0][:1]
    found = np.array(_in_order(mx.array(keys[None]), mx.ones((1, 1, 4500), mx.bool_)))[0, 0]
    np.testing.assert_allclose(found, formula(keys[0]), atol=2e-3)


def test_a_key_that_is_not_finite_does_not_touch_the_others():
    keys, values = keys_of_topics(40)
    damaged = keys.copy()
    damaged[:, 11] = np.inf
    without = np.delete(keys, 11, axis=1), np.delete(values, 11, axis=1)
    method = nestedkv(budget=14, n_sink=2)
    found = kept_after(method, damaged, values, None, [40])
    expected = kept_after(method, *without, None, [39])
    assert found == [[at + (at >= 11) for at in head] for head in expected]


def test_keys_that_are_all_alike_keep_the_first():
    keys, values, _ = tokens(40)
    alike = np.broadcast_to(keys[:, :1], keys.shape)
    assert kept_after(nestedkv(budget=14, n_sink=2), alike, values, None, [40]) == [list(range(14))] * 2

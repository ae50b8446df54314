"""Learned keeps the rows of the highest fitted score."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, tokens
from oracles import best_positions

from velox_fn import learned, qfilters
from velox_fn.engine import scorers
from velox_fn.engine.store import used_rows

RNG = np.random.default_rng(5)
KEYS, KEY_SQUARES = RNG.standard_normal((2, 2, 8)).astype(np.float32)
VALUES, VALUE_SQUARES = RNG.standard_normal((2, 2, 6)).astype(np.float32)
AGE = np.array([0.0, 2.5], np.float32)
SPLITS = [[40], [25, 1, 1, 13], [1] * 40]


def arrays(**changes):
    given = {
        "score_keys": KEYS,
        "score_key_squares": KEY_SQUARES,
        "score_values": VALUES,
        "score_value_squares": VALUE_SQUARES,
        "score_age": AGE,
    }
    return {name: mx.array(array) for name, array in (given | changes).items()}


def expected(keys, values, head, budget):
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    of_keys = keys @ KEYS[head] + keys**2 @ KEY_SQUARES[head]
    of_values = values @ VALUES[head] + values**2 @ VALUE_SQUARES[head]
    return of_keys + of_values + AGE[head] / budget * np.arange(len(keys))


@pytest.mark.parametrize("calls", SPLITS, ids=["block", "mixed", "one by one"])
def test_the_rows_of_the_highest_fitted_score_stay(calls):
    keys, values, _ = tokens(40)
    found = kept_after(learned(budget=10, n_sink=2, **arrays()), keys, values, None, calls)
    for head in range(2):
        scores = expected(keys[head], values[head], head, 10)
        assert found[head] == best_positions(scores, list(range(40)), 40, budget=10, n_sink=2)


def test_every_part_of_the_score_decides_somewhere():
    keys, values, _ = tokens(40)
    whole = kept_after(learned(budget=10, **arrays()), keys, values, None, [40])
    for name, array in arrays().items():
        assert kept_after(learned(budget=10, **arrays(**{name: 0 * array})), keys, values, None, [40]) != whole


def test_of_keys_alone_it_is_qfilters():
    keys, values, _ = tokens(60)
    given = arrays(**{name: 0 * array for name, array in arrays().items() if name != "score_keys"})
    alone = kept_after(learned(budget=12, **given), keys, values, None, [60])
    assert alone == kept_after(qfilters(budget=12, filters=mx.array(KEYS)), keys, values, None, [60])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_rows_in_half_precision_are_scored_in_float32(dtype):
    rows = mx.array([[[[300.0], [301.0], [302.0]]]]).astype(mx.float32)  # squares past the largest float16
    rows = (rows + mx.array([0.0, 1, 2])[:, None]).astype(dtype)
    one, zero = mx.ones((1, 1)), mx.zeros((1, 1))
    given = {"score_keys": zero, "score_key_squares": one, "score_values": zero, "score_value_squares": zero}
    method = learned(budget=2, n_sink=0, **given, score_age=mx.zeros((1,)))
    state, _ = method.update(method.init(1, 1, 1, 1, dtype), rows, rows)
    assert mx.array_equal(state.store.keys[0, 0, :2], rows[0, 0, 1:]).item()


def test_heads_one_by_one_score_the_same_bits(monkeypatch):
    keys, values, _ = tokens(40)
    method, ranks = learned(budget=10, **arrays()), []
    for large in (1, 2**30):
        monkeypatch.setattr(scorers, "_LARGE", large)
        state, _ = method.update(method.init(1, 2, 8, 6), mx.array(keys[None]), mx.array(values[None]))
        ranks.append(np.array(used_rows(state.store).ranks))
    np.testing.assert_array_equal(*ranks)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_row_that_is_not_finite_loses_whatever_the_weights(part):
    keys, values, _ = tokens(30)
    {"keys": keys, "values": values}[part][:, 7, 3] = np.inf
    zeros = {name: 0 * array for name, array in arrays().items() if part[:-1] in name}
    kept = kept_after(learned(budget=29, n_sink=0, **arrays(**zeros)), keys, values, None, [30])
    assert all(7 not in head for head in kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_keys": KEYS[:1]}, "one row for each KV head"),
        ({"score_key_squares": KEY_SQUARES[:, :5]}, "one shape each"),
        ({"score_values": VALUES * np.nan}, "score_values holds NaN"),
        ({"score_age": np.array([[1.0], [2.0]], np.float32)}, r"score_age must be \[n_kv_heads\]"),
        ({"score_age": -AGE}, "score_age must not be negative"),
        ({name: 0 * array for name, array in arrays().items()}, "nothing would score its rows"),
    ],
)
def test_arrays_that_cannot_score_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        learned(**arrays(**changes))


def test_arrays_of_other_heads_or_widths_are_refused_when_a_state_begins():
    method = learned(**arrays())
    for heads, dim, value_dim in ((3, 8, 6), (2, 9, 6), (2, 8, 7)):
        with pytest.raises(ValueError, match="score_"):
            method.init(1, heads, dim, value_dim)


def test_without_a_calibration_a_state_cannot_begin():
    with pytest.raises(ValueError, match=r"learned needs score_keys, .*velox calibrate.*--calibration"):
        learned(budget=10).init(1, 2, 8, 6)

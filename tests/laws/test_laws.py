"""What holds for every method, whatever it scores by."""

import json

import mlx.core as mx
import numpy as np
import pytest
from cases import AS_STORED, BUDGET, CASES, D_V, H_Q, STATIC, Case, D, H
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_fn import METHODS, arrays, kept_positions, kv
from velox_fn.engine.records import statics
from velox_fn.engine.select import rank_scores
from velox_fn.engine.store import kept_rows
from velox_fn.registry import BUILT_IN
from velox_fn.testing import (
    LAWS,
    LAYER,
    bits,
    block,
    fed,
    operations,
    positions,
    the_kept_set_of_a_static_method_does_not_depend_on_the_calls,
)

DIRECTIONS = {"filters", "mean_keys", "query_mean"}  # calibrated arrays as wide as a key
every_method = pytest.mark.parametrize("case", CASES, ids=str)
every_method_that_shows_rows_as_stored = pytest.mark.parametrize("case", AS_STORED, ids=str)
every_static_method = pytest.mark.parametrize("case", STATIC, ids=str)


@every_method
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_law(case, law):
    law(case.make(), LAYER)


@every_method
def test_the_laws_know_from_when_on_rows_leave(case):
    assert case.make().init(1, H, D, D_V).store.warm_up == case.warm_up


def assert_same_state(one, other):
    for a, b in zip((*kv(one), kept_positions(one)), (*kv(other), kept_positions(other)), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@every_method
def test_padding_changes_no_score(case):
    method, tokens = case.make(), block(25, batch=2)
    padded, alone = method.init(2, H, D, D_V), method.init(1, H, D, D_V)
    for start, stop, n_real in ((0, 20, 9), (20, 25, 1)):
        keys, values, queries = (part[:, :, start:stop] for part in tokens)
        valid = mx.array([stop - start, n_real], mx.int32)
        padded, _ = method.update(padded, keys, values, queries=queries, valid=valid)
        keys, values, queries = (part[1:, :, :n_real] for part in (keys, values, queries))
        alone, _ = method.update(alone, keys, values, queries=queries)
    found, expected = (rank_scores(kept_rows(method.scored(state).store).ranks)[-1] for state in (padded, alone))
    np.testing.assert_allclose(np.array(found)[:, :10], np.array(expected), rtol=1e-4, atol=1e-4)


@every_method
def test_large_keys_do_not_overflow(case):
    keys, values, queries = block(40)
    state = fed(case.make(), (keys * 1e5, values, queries), [20, *[1] * 20])
    assert mx.isfinite(kv(state)[0]).all().item()
    assert positions(state).shape[2] == case.most_kept(40)


@every_method
@pytest.mark.parametrize("calls", [[2], [1, 1], [1, 1, 1, 1]], ids=str)
def test_a_budget_of_one_row_keeps_one_row(case, calls):
    windows = {name: 1 for name in ("obs_window", "lag") if name in case.arguments}  # these are of one row at least
    window = len(windows)
    method = case.make(budget=1 + window, n_sink=0, recent=0, grace=0, rollback=0, **windows)
    state = fed(method, block(4), calls)
    assert positions(state).shape[2] == (min(1 + window, sum(calls)) if sum(calls) >= case.warm_up else sum(calls))


@pytest.mark.parametrize("case", [case for case in CASES if case.label != "token"], ids=str)
def test_a_block_costs_the_same_number_of_operations_whatever_its_length(case):
    # A loop over tokens would show.
    method = case.make()
    counts = []
    for n_tokens in (64, 256):
        state = fed(method, block(400), [30, 1, 1])
        mx.eval(arrays(state))
        keys, values, queries = (part[:, :, 32 : 32 + n_tokens] for part in block(400))
        after, view = method.update(state, keys, values, queries=queries)
        counts.append(operations(arrays(after) + list(view)))
    assert counts[0] == counts[1]


@every_method
def test_a_fresh_state_remembers_nothing(case):
    method, long, short = case.make(), block(90, seed=1), block(30, seed=2)
    fed(method, long, [60, *[1] * 30])
    assert_same_state(fed(method, short, [20, *[1] * 10]), fed(case.make(), short, [20, *[1] * 10]))


@every_method
@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "16", None], ids=repr)
def test_a_budget_that_cannot_work_is_refused(case, bad):
    with pytest.raises(ValueError, match="budget must be"):
        case.make(budget=bad)


@every_method
def test_protecting_every_row_is_refused(case):
    with pytest.raises(ValueError, match="must be smaller than budget"):
        case.make(n_sink=BUDGET, recent=0, grace=0)


@every_method
@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ((1, H, 3, D), (1, H, 2, D_V), "agree in batch, heads and tokens"),
        ((1, H, 3, D), (1, H + 1, 3, D_V), "agree in batch, heads and tokens"),
        ((1, H, 3, D), (2, H, 3, D_V), "agree in batch, heads and tokens"),
        ((2, H, 3, D), (2, H, 3, D_V), "the batch size changed from 1 to 2"),
        ((1, H + 1, 3, D), (1, H + 1, 3, D_V), "made for 2 KV heads, got keys with 3"),
        ((1, H, 3, D + 1), (1, H, 3, D_V), "made for head_dim 8"),
        ((1, H, 3, D), (1, H, 3, D_V + 1), "value_dim 6"),
        ((1, H, 0, D), (1, H, 0, D_V), "no token"),
        ((1, H, D), (1, H, D_V), r"keys must be \[B,H,S,D\]"),
    ],
)
def test_a_block_that_does_not_fit_is_refused_and_nothing_is_lost(case, keys, values, message):
    method, tokens = case.make(), block(30)
    state = fed(method, tokens, [20])
    before = positions(state)
    with pytest.raises(ValueError, match=message):
        method.update(state, mx.zeros(keys), mx.zeros(values))
    np.testing.assert_array_equal(positions(state), before)


@every_method
@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("dtypes", [(mx.float32, mx.float16), (mx.float16, mx.float32)], ids=str)
def test_a_block_of_another_type_is_refused_and_not_cast(case, dtypes, n_tokens):
    method = case.make()
    state = fed(method, tuple(part.astype(mx.float16) for part in block(30)), [30])
    keys, values, _ = block(n_tokens)
    with pytest.raises(ValueError, match=r"holds mlx\.core\.float16 keys and mlx\.core\.float16 values"):
        method.update(state, keys.astype(dtypes[0]), values.astype(dtypes[1]))


@every_method
@pytest.mark.parametrize(
    "valid", [mx.array([3]), mx.array([[3], [2]]), mx.array(3), mx.array([3.0, 2.0]), [3, 2]], ids=repr
)
def test_valid_is_one_whole_number_for_each_sequence(case, valid):
    method = case.make()
    keys, values, _ = block(4, batch=2)
    with pytest.raises(ValueError, match=r"valid must be int32 \[2\]"):
        method.update(method.init(2, H, D, D_V), keys, values, valid=valid)


@pytest.mark.parametrize("case", [case for case in CASES if case.make().needs_queries], ids=str)
@pytest.mark.parametrize("shape", [(1, H_Q, 2, D), (1, H_Q, 4, D), (2, H_Q, 3, D), (H_Q, 3, D)], ids=str)
def test_queries_are_one_for_each_token(case, shape):
    method = case.make()
    keys, values, _ = block(3)
    with pytest.raises(ValueError, match=r"queries must be \[1, H_q, 3, D\]"):
        method.update(method.init(1, H, D, D_V), keys, values, queries=mx.zeros(shape))


@pytest.mark.parametrize("case", [case for case in CASES if DIRECTIONS & set(case.make().params)], ids=str)
@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(H + 1, D), (H, D + 1), (D, H)])
def test_calibrated_arrays_of_another_layout_are_refused(case, n_kv_heads, head_dim):
    with pytest.raises(ValueError, match=r"must be .* for this layer, got shape"):
        case.make().init(1, n_kv_heads, head_dim)


@pytest.mark.parametrize("flag", ["False", 1, None], ids=repr)
@pytest.mark.parametrize(("method", "name"), [("curdkv", "mean"), ("h2o", "renumber"), ("streaming_llm", "renumber")])
def test_a_switch_is_true_or_false(method, name, flag):
    with pytest.raises(ValueError, match=f"{name} must be one of False, True"):
        METHODS[method](**{name: flag})


@every_static_method
@given(data=st.data(), seed=st.integers(0, 2**16))
@settings(max_examples=8)
def test_the_kept_set_of_a_static_method_does_not_depend_on_the_calls(case: Case, data, seed):
    cuts = sorted(data.draw(st.sets(st.integers(1, 47), max_size=8)))
    calls = np.diff([0, *cuts, 48]).tolist()
    the_kept_set_of_a_static_method_does_not_depend_on_the_calls(case.make(), LAYER, calls, seed)


@every_method
@pytest.mark.parametrize("whole", [np.int64, np.uint16, lambda n: np.array(n), lambda n: mx.array(n)], ids=range(4))
def test_settings_may_be_whole_numbers_of_any_type(case, whole):
    def other(value):
        return whole(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value

    plain = case.make()
    factory = BUILT_IN[case.method].make
    settings = {name: other(value) for name, value in plain.settings.items()}
    method = factory(**settings, **plain.params)
    assert json.dumps(method.settings) == json.dumps(dict(plain.settings))
    tokens = block(40)
    after, expected = fed(method, tokens, [20, 1, 19]), fed(plain, tokens, [20, 1, 19])
    assert json.dumps(statics(after)) == json.dumps(statics(expected))
    np.testing.assert_array_equal(positions(after), positions(expected))


@pytest.mark.parametrize("name", ["budget", "n_sink", "recent", "rollback", "calib_tokens", "sign"])
@pytest.mark.parametrize("value", [True, np.True_, 8.0, np.float32(8), mx.array(8.0), "8", None], ids=repr)
def test_a_setting_that_is_no_whole_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        METHODS["qfilters"](**{"budget": 64, name: value})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("l2norm", {"budget": 2**31}),
        ("l2norm", {"budget": 2**40, "n_sink": 2**35}),
        ("l2norm", {"budget": 16, "interval": 2**31}),
        ("l2norm", {"budget": 16, "pinned": [(2**31, 2**31 + 5)]}),
        ("morphkv", {"budget": 2**40}),
        ("keyformer", {"budget": 64, "rise": 2**31}),
        ("cur", {"budget": 16, "window": 2**31}),
        ("lagkv", {"budget": 2**40}),
    ],
    ids=str,
)
def test_a_count_past_the_longest_sequence_is_refused(name, settings):
    with pytest.raises(ValueError, match=f"must be at most {2**31 - 1}"):
        BUILT_IN[name].make(**settings)


@pytest.mark.parametrize("method", METHODS)
def test_the_budget_that_an_error_suggests_works(method):
    with pytest.raises(ValueError, match=r"write for example budget=\d+") as refusal:
        METHODS[method](budget=0.5)
    METHODS[method](budget=int(str(refusal.value).rpartition("=")[2]))

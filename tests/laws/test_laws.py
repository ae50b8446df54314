"""What holds for every method, whatever it scores by."""

import io
import json

import mlx.core as mx
import numpy as np
import pytest
from cases import AS_STORED, BUDGET, CASES, D_V, H_Q, N_SINK, STATIC, Case, D, H, bits, block, fed
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_fn import METHODS, arrays, kept_bytes, kept_positions, kv, with_arrays
from velox_fn.engine.records import statics

DIRECTIONS = {"filters", "mean_keys", "query_mean"}  # calibrated arrays as wide as a key
every_method = pytest.mark.parametrize("case", CASES, ids=str)
every_method_that_shows_rows_as_stored = pytest.mark.parametrize("case", AS_STORED, ids=str)
every_static_method = pytest.mark.parametrize("case", STATIC, ids=str)
with_queries_or_proxy = pytest.mark.parametrize("proxy", [True, False], ids=["proxy", "queries"])


def positions(state):
    return np.array(kept_positions(state))


def assert_same_state(one, other):
    for a, b in zip((*kv(one), kept_positions(one)), (*kv(other), kept_positions(other)), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@every_method
@with_queries_or_proxy
def test_kept_rows_never_exceed_the_budget(case, proxy):
    # field cases 3, 12
    method, tokens, seen = case.make(), block(271), 0
    state = method.init(1, H, D, D_V)
    for n_tokens in (1, 4, 3, 1, 1, 257, 1, 1, 2):
        keys, values, queries = (part[:, :, seen : seen + n_tokens] for part in tokens)
        state, _ = method.update(state, keys, values, queries=None if proxy else queries)
        seen += n_tokens
        assert positions(state).shape[2] == case.most_kept(seen)


@every_method
@pytest.mark.parametrize("calls", [[1] * 60, [33, 1, 1, 25]], ids=["one by one", "blocks"])
def test_offset_counts_tokens_and_not_rows(case, calls):
    # field case 1
    assert fed(case.make(), block(60), calls).store.offset.tolist() == [60]


@every_method
@with_queries_or_proxy
def test_kept_rows_are_tokens_bit_for_bit_in_temporal_order(case, proxy):
    tokens = block(70, seed=1)
    state = fed(case.make(), tokens, [30, 1, 1, 1, 20, *[1] * 17], proxy=proxy)
    kept_keys, kept_values = kv(state)
    at = kept_positions(state)
    assert (np.diff(positions(state)) > 0).all()
    np.testing.assert_array_equal(bits(kept_keys), bits(mx.take_along_axis(tokens[0], at[..., None], axis=2)))
    np.testing.assert_array_equal(bits(kept_values), bits(mx.take_along_axis(tokens[1], at[..., None], axis=2)))


@every_method
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_rows_keep_the_dtype_of_the_model(case, dtype):
    # field cases 17, 18: values narrower than keys, and no cast
    tokens = block(40, dtype=dtype)
    keys, values = kv(fed(case.make(), tokens, [30, 1, 1, 8]))
    assert (keys.dtype, values.dtype) == (dtype, dtype)
    assert (keys.shape[3], values.shape[3]) == (D, D_V)


@every_method
def test_large_keys_do_not_overflow(case):
    # field case 18
    keys, values, queries = block(40)
    state = fed(case.make(), (keys * 1e5, values, queries), [20, *[1] * 20])
    assert mx.isfinite(kv(state)[0]).all().item()
    assert positions(state).shape[2] == case.most_kept(40)


@every_method
def test_sinks_stay(case):
    assert (positions(fed(case.make(), block(80), [50, *[1] * 30]))[..., :N_SINK] == np.arange(N_SINK)).all()


@every_method
@pytest.mark.parametrize("calls", [[40], [39, 1], [1] * 40], ids=str)
def test_the_recent_window_stays(case, calls):
    state = fed(case.make(), block(40), calls)
    recent = state.store.recent
    assert (positions(state)[..., positions(state).shape[2] - recent :] == np.arange(40 - recent, 40)).all()


@every_method
@with_queries_or_proxy
def test_first_block_attends_to_itself_and_nothing_else(case, proxy):
    # field case 2: evicting before attention would corrupt it
    keys, values, queries = block(40)
    method = case.make()
    _, view = method.update(method.init(1, H, D, D_V), keys, values, queries=None if proxy else queries)
    np.testing.assert_array_equal(bits(view[0]), bits(keys))
    np.testing.assert_array_equal(bits(view[1]), bits(values))


@every_method_that_shows_rows_as_stored
def test_a_block_attends_to_what_was_kept_and_then_to_itself(case):
    tokens = block(60)
    method = case.make()
    before = fed(method, tokens, [30, 1, 1])
    keys, values = (part[:, :, 32:] for part in tokens[:2])
    _, view = method.update(before, keys, values)
    for seen, kept, new in zip(view, kv(before), (keys, values), strict=True):
        n = kept.shape[2]
        np.testing.assert_array_equal(bits(seen[:, :, n:]), bits(new))
        assert rows_as_sets(seen[:, :, :n]) == rows_as_sets(kept)


@every_method_that_shows_rows_as_stored
def test_one_token_attends_to_what_was_kept_and_to_itself(case):
    # field case 8: the newest token is there for its own query, whatever it scores
    tokens = block(40)
    method = case.make()
    for calls in ([20], [20, 1, 1, 1], [40 - 1]):
        before = fed(method, tokens, calls)
        t = sum(calls)
        keys, values = (part[:, :, t : t + 1] for part in tokens[:2])
        _, view = method.update(before, keys, values)
        for seen, kept, new in zip(view, kv(before), (keys, values), strict=True):
            assert rows_as_sets(seen) == rows_as_sets(mx.concatenate([kept, new], axis=2))


def rows_as_sets(rows):
    return [sorted(row.tobytes() for row in head) for head in np.array(rows).reshape(-1, *rows.shape[2:])]


@every_method
@pytest.mark.parametrize("calls", [[2], [1, 1], [1, 1, 1, 1]], ids=str)
def test_a_budget_of_one_row_keeps_one_row(case, calls):
    # field case 21
    window = 1 if "obs_window" in case.arguments else 0  # such a window is of one row at least
    method = case.make(budget=1 + window, n_sink=0, recent=0, grace=0, obs_window=window, rollback=0)
    state = fed(method, block(4), calls)
    assert positions(state).shape[2] == (min(1 + window, sum(calls)) if sum(calls) >= case.warm_up else sum(calls))


@every_method
@with_queries_or_proxy
def test_a_state_can_be_forked(case, proxy):
    tokens = block(60)
    method = case.make()
    before = fed(method, tokens, [30, 1, 1], proxy=proxy)
    mx.eval(arrays(before))
    held = [np.array(leaf) for leaf in arrays(before)]
    queries = (lambda part: None) if proxy else (lambda part: tokens[2][:, :, part])
    for part in (slice(32, 33), slice(33, 60), slice(40, 41)):
        after, view = method.update(before, tokens[0][:, :, part], tokens[1][:, :, part], queries=queries(part))
        mx.eval(arrays(after), view)
        again, _ = method.update(before, tokens[0][:, :, part], tokens[1][:, :, part], queries=queries(part))
        assert_same_state(after, again)
    for leaf, then in zip(arrays(before), held, strict=True):
        np.testing.assert_array_equal(np.array(leaf), then)


@every_method
@with_queries_or_proxy
@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("seen", [[], [5], [30], [30, 1, 1]], ids=str)
def test_an_update_traces_and_so_never_waits_for_the_device(case, proxy, n_tokens, seen):
    method, tokens = case.make(), block(40)
    state = fed(method, tokens, seen)
    n_leaves = len(arrays(state))

    def step(leaves, keys, values, queries):
        after, view = method.update(with_arrays(state, leaves), keys, values, queries=queries)
        return arrays(after) + list(view)

    new = [part[:, :, 32 : 32 + n_tokens] for part in tokens]
    queries = None if proxy else new[2]
    expected = step(arrays(state), *new[:2], queries)
    found = mx.compile(lambda leaves, k, v, *q: step(leaves, k, v, *(q or (None,))))(
        arrays(state), *new[:2], *([] if proxy else [queries])
    )
    assert len(expected) == n_leaves + 2
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@every_method
def test_a_step_compiled_at_the_first_token_over_budget_serves_those_after_it(case):
    # What is static in a record is fixed when a step is traced, so no later step may depend on its having changed.
    method, tokens = case.make(), block(60)
    state = fed(method, tokens, [30, 1])
    step = mx.compile(lambda leaves, k, v: arrays(method.update(with_arrays(state, leaves), k, v)[0]))
    leaves, eager = arrays(state), state
    for t in range(31, 45):
        keys, values = (part[:, :, t : t + 1] for part in tokens[:2])
        leaves = step(leaves, keys, values)
        eager, _ = method.update(eager, keys, values)
    compiled = with_arrays(state, leaves)
    np.testing.assert_array_equal(positions(compiled), positions(eager))


def operations(outputs):
    """Operations in the graph behind arrays that are not evaluated."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return graph.getvalue().count("[label")


@pytest.mark.parametrize("case", [case for case in CASES if case.label != "token"], ids=str)
def test_a_block_costs_the_same_number_of_operations_whatever_its_length(case):
    # field case 7; a loop over tokens would show
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
@pytest.mark.parametrize("start", [1, 20])
def test_nothing_is_left_unevaluated_when_only_the_view_is_evaluated(case, start):
    # mlx_lm evaluates tokens only: a leaf that the view does not depend on would keep a graph that grows for ever.
    method, tokens = case.make(), block(64)
    state = fed(method, tokens, [start])
    mx.eval(arrays(state))
    for t in range(start, start + 30):
        state, view = method.update(state, tokens[0][:, :, t : t + 1], tokens[1][:, :, t : t + 1])
        mx.eval(view)
    for leaf in arrays(state):
        assert operations([leaf]) <= 1


@every_method
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("calls", [[40], [1] * 40, [12, 1, 1, 26]], ids=["block", "one by one", "mixed"])
def test_rows_that_are_not_finite_lose_and_nothing_breaks(case, where, calls):
    # field case 19
    keys, values, queries = (np.array(part) for part in block(40))
    bad = [6, 11, 17]
    (keys if where == "key" else values)[:, :, bad, 0] = [np.nan, np.inf, -np.inf]
    state = fed(case.make(), tuple(map(mx.array, (keys, values, queries))), calls)
    assert not np.isin(positions(state), bad).any()
    assert positions(state).shape[2] == case.most_kept(40)


@every_method
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_tied_scores_do_not_overflow_budget(case, dtype):
    # field case 20
    tokens = tuple(mx.ones_like(part) for part in block(40, dtype=dtype))
    for calls in ([40], [1] * 40):
        assert positions(fed(case.make(), tokens, calls)).shape[2] == case.most_kept(40)


@every_method
def test_a_fresh_state_remembers_nothing(case):
    # field case 23
    method, long, short = case.make(), block(90, seed=1), block(30, seed=2)
    fed(method, long, [60, *[1] * 30])
    assert_same_state(fed(method, short, [20, *[1] * 10]), fed(case.make(), short, [20, *[1] * 10]))


@every_method
@with_queries_or_proxy
def test_padding_is_never_kept(case, proxy):
    # field case 6; the NaN behind the real tokens must not spread either
    keys, values, queries = (np.array(part) for part in block(30, batch=2))
    for part in (keys, values, queries):
        part[1, :, 21:] = np.nan
    method = case.make(rollback=0)
    state = method.init(2, H, D, D_V)
    for part, valid in ((slice(0, 20), [20, 20]), (slice(20, 29), [9, 1]), (slice(29, 30), [1, 0])):
        k, v, q = (mx.array(whole[:, :, part]) for whole in (keys, values, queries))
        state, view = method.update(state, k, v, queries=None if proxy else q, valid=mx.array(valid, mx.int32))
        assert not mx.isnan(view[0]).any().item()
    assert state.store.offset.tolist() == [30, 21]
    assert positions(state).max(axis=(1, 2)).tolist()[1] <= 20
    assert not mx.isnan(kv(state)[0]).any().item()


@every_method
def test_valid_that_counts_every_token_changes_nothing(case):
    tokens, method = block(30), case.make(rollback=0)
    state = method.init(1, H, D, D_V)
    for part in (slice(0, 12), slice(12, 30)):
        state, _ = method.update(
            state, tokens[0][:, :, part], tokens[1][:, :, part], valid=mx.array([part.stop - part.start], mx.int32)
        )
    expected = positions(fed(method, tokens, [12, 18]))
    n = expected.shape[2]
    np.testing.assert_array_equal(positions(state)[..., :n], expected)
    assert (positions(state)[..., n:] == -1).all()


@every_method
def test_a_batch_in_lockstep_equals_its_rows_alone(case):
    tokens, method, calls = block(40, batch=3), case.make(), [22, *[1] * 6, 12]
    together = positions(fed(method, tokens, calls))
    for b in range(3):
        alone = fed(method, tuple(part[b : b + 1] for part in tokens), calls)
        np.testing.assert_array_equal(together[b], positions(alone)[0])


@every_method
def test_accounting_counts_kept_rows_in_their_dtype(case):
    state = fed(case.make(), block(40, dtype=mx.float16), [30, *[1] * 10])
    rows = H * case.most_kept(40) * (D + D_V) * 2
    beside = sum(leaf.nbytes for leaf in arrays(state)) - sum(leaf.nbytes for leaf in arrays(state.store))
    assert kept_bytes(state) == rows + beside


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
    tokens = block(48, seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, 47), max_size=8)))
    calls = np.diff([0, *cuts, 48]).tolist()
    method = case.make()
    assert_same_state(fed(method, tokens, calls), fed(method, tokens, [48]))


@every_static_method
def test_the_kept_set_of_a_static_method_is_the_same_one_token_at_a_time(case):
    tokens = block(48)
    assert_same_state(fed(case.make(), tokens, [1] * 48), fed(case.make(), tokens, [48]))


@every_method
@pytest.mark.parametrize("whole", [np.int64, np.uint16, lambda n: np.array(n), lambda n: mx.array(n)], ids=range(4))
def test_settings_may_be_whole_numbers_of_any_type(case, whole):
    def other(value):
        return whole(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value

    plain = case.make()
    factory = METHODS[case.method]
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

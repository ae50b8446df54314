"""Q-Filters: what it keeps, with calibrated filters and with the fallback."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import StaticOracle, attention

from velox_fn import estimate_filter_dir, kept_bytes, kept_positions, kv, qfilters, qfilters_init, qfilters_update

H, D, D_V = 3, 16, 8


def tokens(n_tokens, seed=0, batch=1):
    rng = np.random.default_rng(seed)
    return tuple(mx.array(rng.standard_normal((batch, H, n_tokens, dim)).astype(np.float32)) for dim in (D, D_V))


def filters(seed=100):
    drawn = np.random.default_rng(seed).standard_normal((H, D)).astype(np.float32)
    return mx.array(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True))


def fed(method, keys, values, calls):
    state = method.init(keys.shape[0], H, D, D_V, keys.dtype)
    start = 0
    for n_tokens in calls:
        part = slice(start, start + n_tokens)
        state, _ = method.update(state, keys[:, :, part], values[:, :, part])
        start += n_tokens
    return state


def positions(state):
    return np.array(kept_positions(state))[0].tolist()


def test_calibrated_evicts_from_token_0():
    keys, values = tokens(80)
    state = fed(qfilters(budget=20, filters=filters()), keys, values, [80])
    assert kv(state)[0].shape == (1, H, 20, D)


def test_kept_set_is_the_top_projections():
    keys, values = tokens(80)
    state = fed(qfilters(budget=20, n_sink=0, filters=filters()), keys, values, [80])
    scores = np.einsum("hnd,hd->hn", np.array(keys)[0].astype(np.float64), np.array(filters()).astype(np.float64))
    assert positions(state) == [sorted(np.argsort(-row)[:20].tolist()) for row in scores]


def test_sign_turns_the_order_around():
    keys, values = tokens(80)
    state = fed(qfilters(budget=20, n_sink=0, sign=-1, filters=filters()), keys, values, [80])
    scores = np.einsum("hnd,hd->hn", np.array(keys)[0].astype(np.float64), np.array(filters()).astype(np.float64))
    assert positions(state) == [sorted(np.argsort(row)[:20].tolist()) for row in scores]


@given(
    n_sink=st.integers(0, 4),
    recent=st.integers(0, 6),
    spare=st.integers(1, 8),
    calls=st.lists(st.sampled_from([1, 1, 2, 5, 17]), min_size=1, max_size=12),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25)
def test_kept_set_is_that_of_a_sort_written_out(n_sink, recent, spare, calls, seed):
    # Whole numbers project exactly, in any order of summation, and tie often.
    rng = np.random.default_rng(seed)
    directions = rng.integers(-2, 3, (H, D)).astype(np.float32)
    keys = rng.integers(-1, 2, (1, H, sum(calls), D)).astype(np.float32)
    values = rng.standard_normal((1, H, sum(calls), D_V)).astype(np.float32)
    method = qfilters(budget=n_sink + recent + spare, n_sink=n_sink, recent=recent, filters=mx.array(directions))
    oracle = StaticOracle(n_sink + recent + spare, n_sink, recent)
    oracle.see(keys[0], values[0])
    found = positions(fed(method, mx.array(keys), mx.array(values), calls))
    assert found == [oracle.kept(keys[0, head] @ directions[head]) for head in range(H)]


def test_sinks_and_recent_window_survive():
    keys, values = tokens(80)
    for calls in ([80], [30, *[1] * 50]):
        for head in positions(fed(qfilters(budget=20, n_sink=4, recent=6, filters=filters()), keys, values, calls)):
            assert head[:4] == [0, 1, 2, 3]
            assert head[-6:] == list(range(74, 80))


def test_recent_0_lets_the_newest_row_go():
    # the documented rule for recent = 0; the newest row is dead only once its own query has seen it
    keys = mx.broadcast_to(-mx.arange(30.0)[:, None], (1, H, 30, D))
    values = mx.zeros((1, H, 30, D_V))
    direction = mx.ones((H, D))
    state = fed(qfilters(budget=8, n_sink=0, filters=direction), keys, values, [1] * 30)
    assert positions(state) == [list(range(8))] * H


def test_recent_1_keeps_the_newest_row_though_it_scores_lowest():
    keys = mx.broadcast_to(-mx.arange(30.0)[:, None], (1, H, 30, D))
    values = mx.zeros((1, H, 30, D_V))
    state = fed(qfilters(budget=8, n_sink=0, recent=1, filters=mx.ones((H, D))), keys, values, [1] * 30)
    assert positions(state) == [[*range(7), 29]] * H


def test_calibrated_filter_is_path_independent():
    keys, values = tokens(90)
    method = qfilters(budget=20, recent=5, filters=filters())
    prefill, decode = fed(method, keys, values, [90]), fed(method, keys, values, [1] * 90)
    assert positions(prefill) == positions(decode)
    for one, other in zip(kv(prefill), kv(decode), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 19, 20, 21, 64, 90])
def test_calibrated_kept_set_is_invariant_to_prefill_chunk_size(chunk):
    keys, values = tokens(90)
    method = qfilters(budget=20, filters=filters())
    calls = [chunk] * (90 // chunk) + ([90 % chunk] if 90 % chunk else [])
    assert positions(fed(method, keys, values, calls)) == positions(fed(method, keys, values, [90]))


@pytest.mark.parametrize("calib_tokens", [10, 50], ids=["calib within budget", "calib over budget"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 20, 21, 49, 50, 51, 90])
def test_fallback_respects_budget_at_every_prefill_chunk_size(chunk, calib_tokens):
    keys, values = tokens(90)
    method = qfilters(budget=20, calib_tokens=calib_tokens)
    state = method.init(1, H, D, D_V)
    for start in range(0, 90, chunk):
        state, _ = method.update(state, keys[:, :, start : start + chunk], values[:, :, start : start + chunk])
        seen = min(start + chunk, 90)
        assert kv(state)[0].shape[2] == (seen if seen < calib_tokens else min(20, seen))
        assert state.store.offset.tolist() == [seen]


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
@pytest.mark.parametrize("calib_tokens", [10, 50])
def test_fallback_is_invariant_to_prefill_chunk_size_too(chunk, calib_tokens):
    # Differs from the seed on purpose: the filter comes from exactly the first calib_tokens keys.
    keys, values = tokens(90)
    method = qfilters(budget=20, recent=3, calib_tokens=calib_tokens)
    calls = [chunk] * (90 // chunk) + ([90 % chunk] if 90 % chunk else [])
    assert positions(fed(method, keys, values, calls)) == positions(fed(method, keys, values, [90]))


def test_pre_calibration_passthrough():
    keys, values = tokens(49)
    state = fed(qfilters(budget=20, calib_tokens=50), keys, values, [20, 1, 28])
    assert positions(state) == [list(range(49))] * H


def test_fallback_keeps_the_top_projections_on_its_frozen_direction():
    keys, values = tokens(90)
    state = fed(qfilters(budget=20, n_sink=0, calib_tokens=30), keys, values, [90])
    for head in range(H):
        first = np.array(keys)[0, head, :30].astype(np.float64)
        axis = np.linalg.svd(first - first.mean(0))[2][0]
        axis *= np.sign(axis[np.argmax(np.abs(axis))])
        scores = np.array(keys)[0, head] @ axis
        assert positions(state)[head] == sorted(np.argsort(-scores)[:20].tolist())


def test_frozen_filter_never_changes():
    keys, values = tokens(90)
    method = qfilters(budget=20, calib_tokens=30)
    state = fed(method, keys, values, [30])
    frozen = np.array(state.filters)
    np.testing.assert_allclose(np.linalg.norm(frozen, axis=-1), 1, atol=1e-6)
    for start in range(30, 90, 12):
        state, _ = method.update(state, keys[:, :, start : start + 12], values[:, :, start : start + 12])
        np.testing.assert_array_equal(np.array(state.filters), frozen)


def test_fallback_filter_is_that_of_the_first_keys():
    keys, values = tokens(90)
    for calls in ([90], [29, 1, 60], [1] * 90):
        state = fed(qfilters(budget=20, calib_tokens=30), keys, values, calls)
        np.testing.assert_array_equal(np.array(state.filters), np.array(estimate_filter_dir(keys[:, :, :30])))


def test_fallback_survives_keys_without_a_direction():
    # equal keys, and keys that are not finite, leave the SVD nothing
    for fill in (1.0, np.nan, np.inf):
        keys, values = mx.full((1, H, 60, D), fill), mx.ones((1, H, 60, D_V))
        state = fed(qfilters(budget=20, calib_tokens=30), keys, values, [25, 35])
        assert mx.isfinite(state.filters).all().item()
        assert kv(state)[0].shape[2] == 20


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_accounting_counts_the_filter_in_full(dtype):
    keys, values = tokens(50, batch=2)
    state = fed(qfilters(budget=20, filters=filters()), keys.astype(dtype), values.astype(dtype), [50])
    assert kept_bytes(state) == 2 * H * (20 * (D + D_V) * dtype.size + D * 4)


def test_correct_sign_beats_random_eviction_under_the_papers_geometry():
    # Queries drift along a direction u; keys that project far onto u get the attention. A budget of an eighth.
    rng = np.random.default_rng(3)
    n, budget = 256, 32
    drift = np.linalg.qr(rng.standard_normal((D, H)))[0].T
    important = rng.random((H, n)) < 0.1
    along = np.where(important, 6.0, -2.0) + 0.5 * rng.standard_normal((H, n))
    keys = (along[..., None] * drift[:, None] + 0.5 * rng.standard_normal((H, n, D))).astype(np.float32)
    values = rng.standard_normal((H, n, D_V)).astype(np.float32)
    queries = 2 * drift[:, None] + 0.3 * rng.standard_normal((H, 8, D))
    full = attention(queries, keys, values, 1.0, np.ones((8, n), bool))

    def error(kept):
        rows = np.array(kept)[..., None]
        k, v = (np.take_along_axis(part, rows, axis=1) for part in (keys, values))
        left = attention(queries, k, v, 1.0, np.ones((8, rows.shape[1]), bool))
        return np.linalg.norm(left - full) / np.linalg.norm(full)

    def kept(sign):
        method = qfilters(budget=budget, n_sink=0, sign=sign, filters=mx.array(drift.astype(np.float32)))
        return positions(fed(method, mx.array(keys[None]), mx.array(values[None]), [n]))

    drawn = np.mean([error([sorted(rng.choice(n, budget, replace=False)) for _ in range(H)]) for _ in range(20)])
    assert error(kept(1)) < 0.1 * drawn
    assert error(kept(-1)) > 10 * error(kept(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_sink": -1}, "n_sink must be at least 0, got -1"),
        ({"recent": -3}, "recent must be at least 0, got -3"),
        ({"recent": 2.0}, "recent must be a whole number"),
        ({"budget": 16, "n_sink": 4, "recent": 12}, r"got 4 \+ 12 >= 16"),
        ({"sign": 0}, "sign must be one of 1, -1, got 0"),
        ({"sign": 2}, "sign must be one of 1, -1, got 2"),
        ({"calib_tokens": 1}, "calib_tokens must be at least 2, got 1"),
        ({"calib_tokens": 4.5}, "calib_tokens must be a whole number"),
        ({"rollback": -1}, "rollback must be at least 0"),
        ({"filters": mx.zeros((H, D, 1))}, r"filters must be 2-D, \[n_kv_heads, head_dim\]"),
        ({"filters": mx.full((H, D), mx.nan)}, "filters holds NaN or inf"),
        ({"filters": mx.full((H, D), mx.inf)}, "filters holds NaN or inf"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_cannot_work_are_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        qfilters(**arguments)


@pytest.mark.parametrize("make", [qfilters, lambda filters: qfilters_init(1, H, D, filters=filters)])
@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (mx.full((H, D), mx.nan), "NaN or inf"),
        (mx.ones((H, D)) * (mx.arange(H) > 0)[:, None], "nothing but zeros for one head or more"),
        (np.ones((H, D), np.float32), "mx.array"),
        ([[1.0] * D] * H, "mx.array"),
    ],
    ids=["NaN", "a head of zeros", "numpy", "list"],
)
def test_filters_that_cannot_score_are_refused(make, filters, message):
    with pytest.raises(ValueError, match=message):
        make(filters=filters)


@pytest.mark.parametrize("shape", [(H + 1, D), (H, D + 1), (D, H)])
def test_layout_mismatch_raises(shape):
    with pytest.raises(ValueError, match=r"filters must be \[n_kv_heads, head_dim\] = \(3, 16\)"):
        qfilters(filters=mx.ones(shape)).init(1, H, D, D_V)


def test_the_pair_of_functions_is_the_factory():
    keys, values = tokens(50)
    state = qfilters_init(1, H, D, D_V, budget=20, recent=4, filters=filters())
    for part in (slice(0, 30), slice(30, 50)):
        state, _ = qfilters_update(state, keys[:, :, part], values[:, :, part])
    assert positions(state) == positions(fed(qfilters(budget=20, recent=4, filters=filters()), keys, values, [50]))


def test_values_are_as_wide_as_keys_unless_told_otherwise():
    state = qfilters_init(1, H, D)
    assert state.store.values.shape[-1] == D

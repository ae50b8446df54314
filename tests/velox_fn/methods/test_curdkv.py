"""CurDKV against its five steps written out, and the evidence of its design: values decide, not keys alone."""

import mlx.core as mx
import numpy as np
import pytest
from curdkv_oracle import CurDKVOracle

from velox_fn import arrays, curdkv, curdkv_init, curdkv_step, curdkv_update, h2o, kept_positions, kv
from velox_fn.engine.records import with_arrays
from velox_fn.engine.select import rank_scores
from velox_fn.engine.store import kept_rows

SETTINGS = {"budget": 12, "n_sink": 2, "rank_cap": 4}


def tokens(n_tokens, *, batch=1, heads=2, groups=1, head_dim=8, value_dim=8, seed=0):
    """Keys [B,H,S,D], values [B,H,S,D_v], queries [B,H*G,S,D]."""
    rng = np.random.default_rng(seed)
    shapes = ((batch, heads, n_tokens, head_dim), (batch, heads, n_tokens, value_dim))
    keys, values = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    queries = rng.normal(size=(batch, heads * groups, n_tokens, head_dim)).astype(np.float32)
    return mx.array(keys), mx.array(values), mx.array(queries)


def run(keys, values, queries=None, splits=None, method=curdkv, **settings):
    """The state after these tokens, in calls of these sizes."""
    eviction = method(**(SETTINGS | settings))
    state = eviction.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
    at = 0
    for size in splits or [keys.shape[2]]:
        part = slice(at, at + size)
        given = None if queries is None else queries[:, :, part]
        state, _ = eviction.update(state, keys[:, :, part], values[:, :, part], queries=given)
        at += size
    return state


def kept(state, head=0, batch=0):
    return np.array(kept_positions(state))[batch, head].tolist()


def scores(state, head=0, batch=0):
    return np.array(rank_scores(kept_rows(state.store).ranks))[batch, head]


def oracles(keys, values, queries, blocks, **settings):
    """One oracle per head, after these calls; queries in consecutive groups."""
    found = []
    groups = queries.shape[1] // keys.shape[1]
    for head in range(keys.shape[1]):
        oracle, at = CurDKVOracle(**(SETTINGS | settings)), 0
        for size in blocks:
            part = slice(at, at + size)
            of_group = np.array(queries[0, head * groups : (head + 1) * groups, part])
            oracle.block(np.array(keys[0, head, part]), np.array(values[0, head, part]), of_group)
            at += size
        found.append(oracle)
    return found


def assert_as_oracle(state, oracle, head):
    assert kept(state, head) == oracle.positions
    expected = np.where(np.array(oracle.positions) < oracle.n_sink, np.inf, oracle.scores)
    np.testing.assert_allclose(scores(state, head), expected, atol=1e-4)


# The steps


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("recent", [0, 3])
def test_token_granularity_is_the_seed_loop(groups, recent):
    keys, values, queries = tokens(60, groups=groups)
    state = run(keys, values, queries, granularity="token", recent=recent)
    for head, oracle in enumerate(oracles(keys, values, queries, [1] * 60, recent=recent)):
        assert_as_oracle(state, oracle, head)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("splits", [[60], [25, 1, 14, 1, 1, 18]])
def test_block_is_the_stacked_leverage_evicted_once(groups, splits):
    keys, values, queries = tokens(60, groups=groups, seed=1)
    state = run(keys, values, queries, splits)
    for head, oracle in enumerate(oracles(keys, values, queries, splits)):
        assert_as_oracle(state, oracle, head)


def test_keys_stand_in_for_queries():
    keys, values, _ = tokens(60, seed=2)
    state = run(keys, values)
    for head, oracle in enumerate(oracles(keys, values, keys, [60])):
        assert_as_oracle(state, oracle, head)


def test_block_of_one_is_the_step_bit_for_bit():
    keys, values, queries = tokens(40, groups=2, seed=3)
    stepped = curdkv_init(1, 2, 8, **SETTINGS)
    blocked = curdkv_init(1, 2, 8, **SETTINGS, granularity="block")
    folded = curdkv_init(1, 2, 8, **SETTINGS, granularity="token")
    for t in range(40):
        k, v, q = (x[:, :, t : t + 1] for x in (keys, values, queries))
        stepped, view = curdkv_step(stepped, k, v, queries=q)
        blocked, same_view = curdkv_update(blocked, k, v, queries=q)
        folded, _ = curdkv_update(folded, k, v, queries=q)
        assert all(mx.array_equal(a, b).item() for a, b in zip(view, same_view, strict=True))
    for other in (blocked, folded):
        assert all(mx.array_equal(a, b).item() for a, b in zip(arrays(stepped), arrays(other), strict=True))


@pytest.mark.parametrize("splits", [[40], [7, 20, 13], [1] * 40])
def test_prefill_and_decode_go_through_the_same_step(splits):
    keys, values, queries = tokens(40, seed=4)
    whole = run(keys, values, queries, granularity="token")
    split = run(keys, values, queries, splits, granularity="token")
    assert [kept(split, head) for head in range(2)] == [kept(whole, head) for head in range(2)]
    np.testing.assert_allclose(scores(split), scores(whole), atol=1e-5)


def test_step_refuses_a_block():
    keys, values, _ = tokens(2)
    with pytest.raises(ValueError, match="takes one token, got 2"):
        curdkv_step(curdkv_init(1, 2, 8), keys, values)


def test_window_counts_the_last_queries_of_a_block():
    keys, values, queries = tokens(40, groups=2, seed=5)
    windowed = run(keys, values, queries, window=6)
    silent = mx.where(mx.arange(40)[:, None] >= 34, queries, mx.nan)  # a query that is not finite looks at nothing
    full = run(keys, values, silent)
    assert [kept(windowed, head) for head in range(2)] == [kept(full, head) for head in range(2)]
    np.testing.assert_allclose(scores(windowed), scores(full), atol=1e-6)


def test_mean_ranks_rows_by_score_per_token_since_they_came():
    keys, values, queries = tokens(30, seed=6)
    kept_all = {"budget": 40}
    sums = scores(run(keys, values, queries, [1] * 30, **kept_all))
    means = scores(run(keys, values, queries, [1] * 30, mean=True, **kept_all))
    age = 30 - np.arange(30)
    np.testing.assert_allclose(means[2:], (sums / age)[2:], rtol=1e-4)


# What the document claims


def test_identical_keys_different_values_diverge():
    keys = mx.ones((1, 1, 2, 8))
    values = mx.array([[1.0] * 8, [0.1] * 8]).reshape(1, 1, 2, 8)
    first, second = scores(run(keys, values, n_sink=0))
    assert first > second


def planted(seed, n_tokens=40, head_dim=16):
    """Near-identical keys; even positions carry a large value, odd ones almost none."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=head_dim)
    keys = direction + 0.01 * rng.normal(size=(n_tokens, head_dim))
    relevant = np.arange(n_tokens) % 2 == 0
    values = rng.normal(size=(n_tokens, head_dim)) * np.where(relevant, 3.0, 1e-3)[:, None]
    return tuple(mx.array(x.astype(np.float32)[None, None]) for x in (keys, values)), relevant


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("seed", range(8))
def test_planted_geometry_curdkv_prefers_value_relevant_tokens(seed, granularity):
    (keys, values), relevant = planted(seed)
    state = run(keys, values, budget=8, n_sink=0, granularity=granularity)
    assert relevant[kept(state)].tolist() == [True] * 8


def test_h2o_blind_spot_on_same_planted_geometry():
    shares = []
    for seed in range(8):
        (keys, values), relevant = planted(seed)
        state = run(keys, values, splits=[1] * 40, method=lambda **_: h2o(budget=8, n_sink=0, grace=0))
        shares.append(relevant[kept(state)].mean())
    assert 0.3 < np.mean(shares) < 0.7


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_sink_with_negligible_value_is_protected(granularity):
    keys, values, _ = tokens(60, seed=7)
    values[:, :, :2] = 1e-6
    assert kept(run(keys, values, granularity=granularity))[:2] == [0, 1]


def test_without_sinks_a_first_token_of_negligible_value_leaves():
    keys, values, _ = tokens(60, seed=7)
    values[:, :, :2] = 1e-6
    assert not {0, 1} & set(kept(run(keys, values, n_sink=0)))


def test_negligible_newcomer_is_evicted_at_the_next_step_over_budget():
    keys, values, _ = tokens(13, seed=8)
    values[:, :, 12:] = 0.0
    state = run(keys, values, splits=[1] * 13)
    assert 12 not in kept(state)


def test_newcomer_of_great_value_is_kept_from_its_first_step():
    keys, values, _ = tokens(13, seed=8)
    values[:, :, 12:] *= 50
    assert 12 in kept(run(keys, values, splits=[1] * 13))


def test_block_of_zero_values_stays_finite():
    keys, _, _ = tokens(40, seed=9)
    state = run(keys, mx.zeros_like(keys))
    assert np.isfinite(scores(state)[2:]).all()
    assert kept(state) == list(range(12))  # equal scores: lower positions stay


def test_two_runs_agree_bit_for_bit():
    keys, values, queries = tokens(60, seed=10)
    once, again = (run(keys, values, queries, [30, 1, 29]) for _ in range(2))
    assert all(mx.array_equal(a, b).item() for a, b in zip(arrays(once), arrays(again), strict=True))


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_heads_and_sequences_do_not_touch_each_other(granularity):
    keys, values, queries = tokens(40, batch=3, heads=4, groups=2, value_dim=6, seed=11)
    together = run(keys, values, queries, granularity=granularity)
    k, v = kv(together)
    assert (k.shape, v.shape) == ((3, 4, 12, 8), (3, 4, 12, 6))
    for b in range(3):
        for h in range(4):
            of_head = queries[b : b + 1, 2 * h : 2 * h + 2]
            alone = run(keys[b : b + 1, h : h + 1], values[b : b + 1, h : h + 1], of_head, granularity=granularity)
            assert kept(alone) == kept(together, h, b)


# Budgets, padding, dtypes


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("n_tokens", [11, 12, 13, 30])
def test_budget_is_met_exactly(granularity, n_tokens):
    keys, values, _ = tokens(n_tokens, seed=12)
    assert len(kept(run(keys, values, granularity=granularity))) == min(n_tokens, 12)


def test_first_blocks_view_is_the_block_itself():
    keys, values, _ = tokens(40)
    _, (seen_keys, seen_values) = curdkv_update(curdkv_init(1, 2, 8, **SETTINGS), keys, values)
    assert mx.array_equal(seen_keys, keys).item()
    assert mx.array_equal(seen_values, values).item()


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("window", [None, 4])
def test_padded_rows_keep_what_they_would_keep_alone(granularity, window):
    lengths, settings = [30, 17], {"granularity": granularity, "window": window}
    keys, values, queries = tokens(30, batch=2, groups=2, seed=13)
    state = curdkv_init(2, 2, 8, **SETTINGS, **settings)
    state, _ = curdkv_update(state, keys, values, queries=queries, valid=mx.array(lengths, mx.int32))
    for b, n in enumerate(lengths):
        alone = run(*(x[b : b + 1, :, :n] for x in (keys, values, queries)), **settings)
        for head in range(2):
            assert [p for p in kept(state, head, b) if p >= 0] == kept(alone, head)
            np.testing.assert_allclose(scores(state, head, b)[:12], scores(alone, head), atol=1e-5)
    assert state.store.offset.tolist() == lengths


@pytest.mark.parametrize("n_padding", [1, 3])
def test_padding_leaves_the_tracked_directions_of_a_sequence_alone(n_padding):
    state = run(*tokens(20, value_dim=16), rank_cap=2)
    keys, values, _ = tokens(n_padding, value_dim=16)
    after, _ = curdkv_update(state, keys, values, valid=mx.array([0], mx.int32))
    assert mx.array_equal(after.basis[0], state.basis[0]).item()


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_row_that_is_not_finite_loses_and_the_rest_goes_on(granularity, bad, part):
    keys, values, queries = tokens(40, seed=14)
    (keys if part == "key" else values)[:, :, 20, 3] = bad
    state = run(keys, values, queries, granularity=granularity)
    assert 20 not in kept(state)
    assert np.isfinite(scores(state)[2:]).all()


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_keys_that_overflow_their_logits_do_no_harm(granularity):
    keys, values, _ = tokens(40, seed=15)
    state = run(keys * 1e25, values, granularity=granularity)
    assert np.isfinite(scores(state)[2:]).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_keep_their_dtype_bit_for_bit(dtype):
    keys, values, _ = tokens(40, value_dim=6, seed=16)
    keys, values = keys.astype(dtype), values.astype(dtype)
    state = run(keys, values, splits=[20, 1, 19])
    index = kept_positions(state)[..., None]
    assert mx.array_equal(kv(state)[0], mx.take_along_axis(keys, index, axis=2)).item()
    assert mx.array_equal(kv(state)[1], mx.take_along_axis(values, index, axis=2)).item()


# Purity


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_a_state_can_be_forked(granularity):
    keys, values, _ = tokens(40, seed=17)
    state = run(keys[:, :, :20], values[:, :, :20], granularity=granularity)
    before = [np.array(leaf) for leaf in arrays(state)]
    one, _ = curdkv_update(state, keys[:, :, 20:30], values[:, :, 20:30])
    other, _ = curdkv_update(state, keys[:, :, 20:30], -values[:, :, 20:30])
    mx.eval(arrays(one), arrays(other))
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, arrays(state), strict=True))


def test_step_over_budget_traces_under_compile():
    keys, values, queries = tokens(20, seed=18)
    state = run(keys[:, :, :19], values[:, :, :19], queries[:, :, :19], splits=[18, 1])
    last = [x[:, :, 19:] for x in (keys, values, queries)]

    def step(leaves, k, v, q):
        after, view = curdkv_step(with_arrays(state, leaves), k, v, queries=q)
        return arrays(after), view

    plain, compiled = step(arrays(state), *last), mx.compile(step)(arrays(state), *last)
    for a, b in zip(plain[0], compiled[0], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, "budget must be at least 1"),
        ({"n_sink": -1}, "n_sink must be at least 0"),
        ({"budget": 8, "n_sink": 4, "recent": 4}, "must be smaller than budget"),
        ({"rank_cap": 0}, "rank_cap must be at least 1"),
        ({"granularity": "row"}, "granularity must be one of"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        curdkv(**settings)

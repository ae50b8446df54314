"""Values of rows that leave, merged into rows that follow: CaM's algorithm 1, written anew in numpy, row by row."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from velox_fn import METHODS, Eviction, at_intervals, h2o, kept_positions, kv, l2norm, merging, quantised, streaming_llm
from velox_fn.engine import batch
from velox_fn.engine.records import replaced
from velox_fn.registry import BUILT_IN
from velox_fn.testing import LAWS, Layer, block, fed
from velox_fn.testing.trials import begun, bits, cut_out, positions

LAYER = Layer()
READ_QUERIES = [name for name in METHODS if BUILT_IN[name].factory is not h2o and not BUILT_IN[name].needs_calibration]
READ_QUERIES = ["h2o", *(name for name in READ_QUERIES if BUILT_IN[name].make(budget=64).observation is not None)]
WINDOWS: dict[str, dict[str, int]] = {
    "h2o": {"grace": 4},
    "snapkv": {"obs_window": 4, "kernel": 3},
    "morphkv": {"obs_window": 4},
}


def h2o_of(merge: int, **settings: Any) -> Eviction:
    return BUILT_IN["h2o"].make(budget=12, n_sink=2, grace=3, merge=merge, **settings)


def drawn(seed: int, position: int) -> float:
    """The finaliser of MurmurHash3, twice, as a number in [0, 1)."""

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    return (mixed(mixed(seed) ^ position) >> 8) / 2**24


def merged_values(
    head: tuple[NDArray[Any], ...], calls: list[int], kept_after: list[list[int]], m: int, seed: int
) -> tuple[list[NDArray[Any]], int]:
    """The values of one KV head's kept rows after all calls, in float64, and how many rows were merged."""
    keys, values, queries = (part.astype(np.float64) for part in head)  # [n,D], [n,D_v], [G,n,D]
    rows: dict[int, NDArray[Any]] = {}
    attention: dict[int, float] = {}
    start, n_merged = 0, 0
    for n_tokens, kept in zip(calls, kept_after, strict=True):
        for t in range(start, start + n_tokens):
            rows[t], attention[t] = values[t].copy(), 0.0
        for t in range(start, start + n_tokens):
            seen = [i for i in rows if i <= t]
            for group in queries:
                logits = keys[seen] @ group[t] / np.sqrt(keys.shape[1])
                weights = np.exp(logits - logits.max())
                for i, weight in zip(seen, weights / weights.sum(), strict=True):
                    attention[i] += weight
        merged: dict[int, list[NDArray[Any]]] = {k: [] for k in kept}
        for i in sorted(set(rows) - set(kept)):
            follow = [k for k in sorted(kept) if k > i][:m]
            if not follow:
                continue
            mean = np.mean([attention[k] for k in follow])
            probability = np.clip(attention[i] / mean, 0, 1)
            if drawn(seed, i) < probability:
                n_merged += 1
                for k in follow:
                    merged[k].append(rows[i])
        for k, those in merged.items():
            if those:
                rows[k] = rows[k] + np.sum(those, axis=0) / max(m, len(those))
        rows, attention = {k: rows[k] for k in kept}, {k: attention[k] for k in kept}
        start += n_tokens
    return [rows[k] for k in sorted(rows)], n_merged


@pytest.mark.parametrize("merge", [1, 3, 32])
@pytest.mark.parametrize("calls", [[1] * 40, [20, 1, 1, 9, 9]], ids=["tokens", "blocks"])
def test_values_are_those_of_the_algorithm(merge: int, calls: list[int]) -> None:
    tokens, method, kept_after = block(40, seed=3), h2o_of(merge, merge_seed=7), []
    state = begun(method, tokens)
    for start, n_tokens in zip(np.cumsum([0, *calls]).tolist(), calls, strict=False):
        keys, values, queries = cut_out(tokens, start, n_tokens)
        state, _ = method.update(state, keys, values, queries=queries)
        kept_after.append(positions(state))
    found = np.array(kv(state)[1])
    some_merged, n_shared = 0, LAYER.n_heads // LAYER.n_kv_heads
    for b in range(found.shape[0]):
        for head in range(found.shape[1]):
            group = slice(head * n_shared, (head + 1) * n_shared)
            own_tokens = tuple(np.array(part)[b, rows] for part, rows in zip(tokens, (head, head, group), strict=True))
            kept = [sorted(int(p) for p in after[b, head]) for after in kept_after]
            expected, n_merged = merged_values(own_tokens, calls, kept, merge, 7)
            np.testing.assert_allclose(found[b, head], np.stack(expected), rtol=2e-4, atol=2e-5)
            some_merged += n_merged
    assert some_merged > 5


def test_the_method_chooses_the_rows_and_keys_stay_as_they_came() -> None:
    tokens, calls = block(60, seed=1), [20, 1, 1, 9, *[1] * 29]
    plain, merged = fed(h2o_of(0), tokens, calls), fed(h2o_of(4), tokens, calls)
    assert np.array_equal(positions(plain), positions(merged))
    assert np.array_equal(bits(kv(plain)[0]), bits(kv(merged)[0]))
    assert not np.array_equal(bits(kv(plain)[1]), bits(kv(merged)[1]))


def test_what_a_row_gains_in_a_call_is_at_most_a_mean() -> None:
    keys, values, queries = block(400, seed=2)
    state = fed(h2o_of(4), (keys, mx.ones_like(values), queries), [400])
    assert np.array(kv(state)[1]).max() <= 2 + 1e-5


def test_a_row_that_is_not_finite_is_not_merged() -> None:
    keys, values, queries = (np.array(part) for part in block(40, seed=4))
    values[:, :, [9, 21]], keys[:, :, 13] = np.nan, np.inf
    state = fed(h2o_of(4), (mx.array(keys), mx.array(values), mx.array(queries)), [30, *[1] * 10])
    assert all(mx.isfinite(half).all().item() for half in kv(state))


@pytest.mark.parametrize("name", READ_QUERIES)
@pytest.mark.parametrize("law", sorted(LAWS.keys() - {"kept_rows_are_tokens_in_order"}))  # values hold others'
def test_the_laws_hold(name: str, law: str) -> None:
    LAWS[law](BUILT_IN[name].make(budget=16, n_sink=2, merge=4, **WINDOWS.get(name, {})), LAYER)


@pytest.mark.parametrize("name", ["h2o", "curdkv", "tova"])
def test_at_a_boundary_an_interval_is_merged_as_one_block(name: str) -> None:
    tokens, make, settings = block(33, seed=5), BUILT_IN[name].make, {"budget": 12, "merge": 4, **WINDOWS.get(name, {})}
    blocks = fed(make(**settings), tokens, [8] * 4, proxy=False)
    state = fed(make(**settings, interval=8), tokens, [8, 8, 3, 5, 8, 1], proxy=False)
    for of_blocks, half in zip(kv(blocks), kv(state), strict=True):
        np.testing.assert_allclose(np.array(of_blocks), np.array(half[:, :, :12]), rtol=1e-5, atol=1e-6)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="l2norm reads no queries"):
        merging(l2norm(budget=16))
    with pytest.raises(ValueError, match="streaming_llm reads no queries"):
        BUILT_IN["streaming_llm"].make(budget=16, merge=8)
    with pytest.raises(ValueError, match="evicts at intervals already"):
        merging(h2o(budget=64, interval=8))
    with pytest.raises(ValueError, match="merge must be"):
        merging(h2o(budget=64), merge=-1)
    with pytest.raises(ValueError, match="merge=32 adds to stored values"):
        quantised(merging(h2o(budget=64)), value_bits=8)
    with pytest.raises(ValueError, match="merge_seed must be at most 4294967295"):
        merging(h2o(budget=64), merge_seed=2**32)
    assert merging(h2o(budget=64), merge_seed=2**32 - 1).settings["merge_seed"] == 2**32 - 1
    assert merging(streaming_llm(budget=16), merge=0).name == "streaming_llm"


def test_keys_alone_may_be_quantised() -> None:
    method = at_intervals(quantised(merging(h2o(budget=64)), key_bits=8, group_size=32), 8)
    state = fed(method, block(90, layer=Layer(head_dim=32, value_dim=32)), [8] * 11 + [2])
    assert kept_positions(state).shape[2] == 66


def test_rows_may_leave_in_chunks() -> None:
    tokens, make = block(33, seed=5), BUILT_IN["h2o"].make
    settings: dict[str, Any] = {"budget": 12, "n_sink": 2, "grace": 3, "interval": 8, "chunk": 4}
    plain, merged = (fed(make(**settings, merge=m), tokens, [8, 8, 8, 8, 1], proxy=False) for m in (0, 4))
    assert np.array_equal(positions(plain), positions(merged))
    assert not np.array_equal(bits(kv(plain)[1]), bits(kv(merged)[1]))


def test_a_row_in_the_place_of_one_taken_back_begins_without_its_attention() -> None:
    tokens, others, method = block(10, seed=1), block(10, seed=2), h2o_of(4)
    after_prompt = fed(method, tokens, [7])
    long, _ = method.update(after_prompt, *cut_out(tokens, 7, 3)[:2])
    back = replaced(long, store=batch.trim(long.store, 3))
    found, expected = (method.update(state, *cut_out(others, 7, 3)[:2])[0] for state in (back, after_prompt))
    assert mx.array_equal(found.mass[:, :, 7:10], expected.mass[:, :, 7:10]).item()

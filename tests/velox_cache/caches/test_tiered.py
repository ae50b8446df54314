"""The cache of a layer whose heads have different budgets, as mlx_lm speaks to it."""

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import velox_cache as vc
from velox_cache.caches.digest import digest
from velox_cache.caches.own_attention import TierMasks
from velox_cache.caches.tier_heads import TierHeads
from velox_cache.caches.tiered import TieredKVCache
from velox_cache.installation.layer_budgets import LayerBudgetKVCache
from velox_fn import Eviction, arrays, kept_positions
from velox_fn.methods.l2norm import l2norm
from velox_fn.testing import operations

H, D, D_V = 4, 8, 6
HEADS = ((0, 3), (1,), (2,))
BUDGETS = (6, 12, 9)


def made(factory: Callable[..., Eviction] = l2norm, heads: Any = HEADS, snapshots: int = 0, **settings: Any) -> Any:
    settings = {"n_sink": 1, **settings}
    caches = [LayerBudgetKVCache(factory(budget=budget, **settings), snapshots=snapshots) for budget in BUDGETS]
    return TieredKVCache(caches, heads)


def rows(n_tokens: int, batch: int = 1, seed: int = 0) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    keys, values = (mx.array(rng.standard_normal((batch, H, n_tokens, dim)).astype(np.float32)) for dim in (D, D_V))
    return keys, values


def fed(cache: Any, tokens: Sequence[mx.array], calls: Sequence[int]) -> Any:
    start = 0
    for n_tokens in calls:
        mx.eval(cache.update_and_fetch(*(part[:, :, start : start + n_tokens] for part in tokens)))
        start += n_tokens
    return cache


def kept(cache: Any) -> list[Any]:
    """Positions by tier; of a batch without padding."""
    return [np.array(kept_positions(tier.record)).tolist() for tier in cache.tiers]


@pytest.mark.parametrize("heads", [((0, 3), (1,), (2,)), ((2,), (0, 1), (3,)), ((0, 1, 2, 3),)], ids=str)
def test_heads_that_are_split_and_joined_are_the_same(heads: Any) -> None:
    of_heads = TierHeads(heads)
    queries = mx.array(np.random.default_rng(0).standard_normal((2, 3 * H, 5, D)))
    parts = of_heads.split(queries)
    for part, own in zip(parts, heads, strict=True):
        expected = np.array(queries).reshape(2, H, 3, 5, D)[:, list(own)].reshape(2, -1, 5, D)
        np.testing.assert_array_equal(np.array(part), expected)
    np.testing.assert_array_equal(np.array(of_heads.joined(parts)), np.array(queries))


@pytest.mark.parametrize("heads", [((0, 1), (1, 2)), ((0,), (2,)), ((1, 0),), (), ((),)], ids=str)
def test_tiers_that_are_not_all_heads_once_are_refused(heads: Any) -> None:
    with pytest.raises(ValueError, match="each once"):
        TierHeads(heads)


@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_that_of_each_head_over_its_own_rows(n_tokens: int, with_sinks: bool) -> None:
    cache = fed(made(), rows(30), [30])
    kept_keys = [np.array(tier.record.store.keys, np.float64) for tier in cache.tiers]
    assert len({keys.shape[2] for keys in kept_keys}) == len(BUDGETS)
    view = cache.update_and_fetch(*rows(n_tokens, seed=1))
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((1, 2 * H, n_tokens, D)).astype(np.float32)
    sinks = rng.standard_normal(2 * H).astype(np.float32) if with_sinks else None
    mask = cache.make_mask(n_tokens)
    found = view[0].attend(mx.array(queries), *view, 0.4, mask=mask, sinks=None if sinks is None else mx.array(sinks))
    for i, heads in enumerate(HEADS):
        for j, head in enumerate(heads):
            keys, values = (np.array(half[i][0, j], np.float64) for half in view)
            for query in (2 * head, 2 * head + 1):
                logits = queries[0, query].astype(np.float64) @ keys.T * 0.4
                unseen = np.arange(len(keys)) > np.arange(n_tokens)[:, None] + len(keys) - n_tokens
                weights = np.exp(np.where(unseen, -np.inf, logits))
                drawn = 0 if sinks is None else np.exp(np.float64(sinks[query]))
                expected = weights @ values / (weights.sum(-1, keepdims=True) + drawn)
                np.testing.assert_allclose(np.array(found[0, query]), expected, rtol=2e-5, atol=2e-5)


def test_each_sequence_of_a_ragged_batch_keeps_what_it_keeps_alone() -> None:
    lengths, n_tokens = [25, 4, 13], 25
    tokens = rows(n_tokens, batch=3)
    batch = made().merge([made() for _ in lengths])
    batch.prepare(lengths=lengths, right_padding=[n_tokens - length for length in lengths])
    fed(batch, tokens, [10, 15])
    batch.finalize()
    steps = rows(3, batch=3, seed=1)
    fed(batch, steps, [1, 1, 1])
    assert batch.offset.tolist() == [length + 3 for length in lengths]
    masks = batch.layer_mask(1, as_array=False)
    assert isinstance(masks, TierMasks)
    assert [mask if mask is None else mask.shape for mask in masks] == [None, (3, 1, 1, 13), (3, 1, 1, 10)]
    for b, length in enumerate(lengths):
        own = [
            mx.concatenate([part[b : b + 1, :, :length], step[b : b + 1]], axis=2)
            for part, step in zip(tokens, steps, strict=True)
        ]
        alone = fed(made(), own, [length + 3])
        assert kept(batch.extract(b)) == kept(alone)
        assert batch.extract(b).offset == alone.offset


def test_sequences_leave_a_batch_and_join_it() -> None:
    alone = [fed(made(), rows(n, seed=n), [n]) for n in (20, 5, 30)]
    batch = alone[0].merge(alone[:2])
    batch.extend(alone[2].merge([alone[2]]))
    batch.filter([2, 0])
    assert batch.offset.tolist() == [30, 20]
    assert [kept(batch.extract(i)) for i in range(2)] == [kept(alone[2]), kept(alone[0])]


def test_tokens_are_taken_back_from_all_tiers_or_none() -> None:
    tokens = rows(40)
    cache = fed(made(rollback=3), tokens, [20, 1, 1])
    assert cache.trim(2) == 2
    assert cache.offset == 20
    assert kept(fed(cache, [part[:, :, 20:] for part in tokens], [5])) == kept(fed(made(rollback=3), tokens, [25]))
    without = fed(made(), tokens, [8])  # the smallest tier has evicted, the others could go back
    before = kept(without)
    assert not without.is_trimmable()
    assert without.trim(1) == 0
    assert (without.offset, kept(without)) == (8, before)
    shorter = fed(made(), tokens, [5])
    assert shorter.trim(2) == 2
    assert kept(fed(shorter, [part[:, :, 3:] for part in tokens], [20])) == kept(fed(made(), tokens, [23]))


def test_a_cache_that_evicts_at_intervals_goes_back_by_snapshots() -> None:
    tokens = rows(40)
    cache = fed(made(interval=8, snapshots=2), tokens, [8, 8, 8, 2])
    assert cache.parts(9) == (6, 3)
    assert cache.trim(5) == 5
    expected = fed(made(interval=8), tokens, [8, 8, 5])
    assert kept(cache) == kept(expected)


def test_pinned_rows_stay_in_every_tier() -> None:
    cache = made()
    cache.pin([(4, 6)])
    fed(cache, rows(30), [30])
    assert all({4, 5} <= set(head) for tier in kept(cache) for head in tier[0])
    assert cache.pinned == (((4, 6),),)


def test_rows_are_quantised_from_here_on() -> None:
    rng = np.random.default_rng(0)
    tokens = [mx.array(rng.standard_normal((1, H, 30, 32)).astype(np.float32)) for _ in range(2)]
    plain = fed(made(), tokens, [25])
    packed = plain.to_quantized(group_size=32, bits=8)
    assert packed.nbytes < plain.nbytes
    with pytest.raises(AttributeError, match="quantised already"):
        packed.to_quantized(bits=4)
    queries = mx.array(rng.standard_normal((1, H, 1, 32)).astype(np.float32))
    outputs = []
    for cache in (plain, packed):
        view = cache.update_and_fetch(*(part[:, :, 25:26] for part in tokens))
        outputs.append(np.array(view[0].attend(queries, *view, 0.2)))
    np.testing.assert_allclose(*outputs, atol=0.05)
    assert kept(plain) == kept(packed)


def test_what_is_refused_leaves_every_tier_as_it_was() -> None:
    cache = fed(made(), rows(20), [20])
    before = kept(cache)
    other = made(heads=((0, 1), (2,), (3,)))
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: cache.update_and_fetch(*(part[:, :3] for part in rows(1))), "4 KV heads"),
        (lambda: cache.merge([cache, other]), "same heads in each tier"),
        (lambda: cache.merge([cache, vc.EvictingKVCache(l2norm(budget=6))]), "same heads in each tier"),
        (lambda: cache.merge([cache, made(n_sink=2)]), "one set of settings"),
        (lambda: cache.extend(other), "same heads in each tier"),
        (lambda: cache.extract(1), "one of the 1 sequences"),
        (lambda: cache.filter([2]), "one of the 1 sequences"),
        (lambda: cache.pin([(0, 1)]), "too late"),
        (lambda: setattr(cache, "state", other.state), "same heads in each tier"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert (cache.offset, kept(cache)) == (20, before)
    with pytest.raises(ValueError, match="one for each"):
        TieredKVCache(cache.tiers, ((0, 1, 2, 3),))


def test_prompt_files_hold_tiers(tmp_path: Any) -> None:
    cache = fed(made(), rows(20), [20])
    vc.save_prompt_cache(tmp_path / "prompt", [cache, vc.EvictingKVCache(l2norm())])
    loaded, _ = vc.load_prompt_cache(tmp_path / "prompt")
    assert (type(loaded), loaded.heads, kept(loaded)) == (TieredKVCache, cache.heads, kept(cache))
    assert {type(tier) for tier in loaded.tiers} == {LayerBudgetKVCache}
    pickled = pickle.loads(pickle.dumps(cache))
    assert kept(pickled) == kept(copy.copy(cache)) == kept(cache)
    empty = TieredKVCache.from_state(made().state)
    assert empty.empty()


def test_a_state_that_was_changed_is_refused() -> None:
    state = fed(made(), rows(20), [20]).state
    header = json.loads(state[0])
    swapped = json.dumps({**header, "heads": [[0, 3], [2], [1]]})
    uneven = json.dumps({**header, "heads": [[0], [1, 3], [2]]})
    later = fed(made(), rows(21), [21]).state
    for packed, message in (
        ([swapped, *state[1:]], "do not match their digest"),
        ([uneven, digest(uneven, []), *state[2:]], "contradict each other"),
        ([*state[:2], later[2], *state[3:]], "contradict each other"),
        (state[:-1], "do not match their digest"),
        (state[:1], "not the state of a Velox KV cache with tiers"),
        (["{}", *state[1:]], "not the state of a Velox KV cache with tiers"),
        (fed(vc.EvictingKVCache(l2norm()), rows(3), [3]).state, "not the state of a Velox KV cache with tiers"),
    ):
        with pytest.raises(ValueError, match=message):
            TieredKVCache.from_state(packed)


def test_nothing_that_a_step_leaves_waits_to_be_computed() -> None:
    """mlx_lm evaluates tokens only: whatever a tier keeps must hang on what attention gives."""
    cache, tokens = made(), rows(40)
    for at in range(40):
        view = cache.update_and_fetch(*(part[:, :, at : at + 1] for part in tokens))
        mx.eval(view[0].attend(tokens[0][:, :, at : at + 1], *view, 0.3))
    assert [operations(arrays(tier.record)) for tier in cache.tiers] == [0, 0, 0]

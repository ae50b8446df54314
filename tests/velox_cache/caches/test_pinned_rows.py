"""Pinned positions of single sequences in the adapter: through batches, copies and files."""

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
import velox_fn
from velox_cache.caches.digest import digest
from velox_fn import kept_positions
from velox_fn.testing import block

KEYS, VALUES, _ = block(80, seed=2)
PINS = {0: [(3, 6)], 1: [(8, 9), (20, 23)], 2: []}
intervals = pytest.mark.parametrize("interval", [1, 8], ids="interval={}".format)


def cache_of(pinned: Any, interval: int, n_tokens: int = 0) -> vc.EvictingKVCache:
    cache = vc.EvictingKVCache(velox_fn.l2norm(budget=16, n_sink=2, interval=interval))
    if pinned:
        cache.pin(pinned)
    return fed(cache, 0, n_tokens)


def fed(cache: vc.EvictingKVCache, start: int, n_tokens: int) -> vc.EvictingKVCache:
    for t in range(start, start + n_tokens):
        cache.update_and_fetch(KEYS[:, :, t : t + 1], VALUES[:, :, t : t + 1])
    return cache


def kept(cache: vc.EvictingKVCache) -> list[list[int]]:
    return [[at for at in head if at >= 0] for head in np.array(kept_positions(cache.record))[0].tolist()]


@intervals
@pytest.mark.parametrize("begun", [0, 33], ids=["empty", "begun"])
def test_sequences_of_a_batch_keep_what_each_has_pinned(interval: int, begun: int) -> None:
    batch = vc.EvictingKVCache.merge([cache_of(PINS[b], interval, begun and begun + b) for b in PINS])
    offsets = [begun and begun + b for b in PINS]
    for t in range(25):
        both = ([whole[:, :, n + t : n + t + 1] for n in offsets] for whole in (KEYS, VALUES))
        batch.update_and_fetch(*(mx.concatenate(rows) for rows in both))
    batch.filter([2, 0, 1])
    assert batch.pinned == ((), ((3, 6),), ((8, 9), (20, 23)))
    for row, b in enumerate([2, 0, 1]):
        one = batch.extract(row)
        alone = cache_of(PINS[b], interval, offsets[b] + 25)
        assert kept(fed(one, offsets[b] + 25, 10)) == kept(fed(alone, offsets[b] + 25, 10))
        expected = [at for start, stop in PINS[b] for at in range(start, stop)]
        assert all(set(expected) <= set(head) for head in kept(one))


@intervals
@pytest.mark.parametrize("begun", [0, 33], ids=["empty", "begun"])
def test_copies_and_states_keep_what_is_pinned(interval: int, begun: int, tmp_path: Path) -> None:
    cache = cache_of(PINS[0], interval, begun)
    loaded = vc.EvictingKVCache.from_state(cache.state)
    if begun:
        vc.save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache], {})
        loaded = vc.load_prompt_cache(str(tmp_path / "cache.safetensors"))[0]
    expected = kept(cache_of(PINS[0], interval, begun + 30))
    for twin in (loaded, copy.deepcopy(cache)):
        assert twin.pinned == (((3, 6),),)
        assert kept(fed(twin, begun, 30)) == expected


@intervals
def test_a_sequence_that_leaves_a_batch_with_pins_is_saved_with_its_own(interval: int, tmp_path: Path) -> None:
    batch = vc.EvictingKVCache.merge([cache_of(PINS[b], interval, 33 + b) for b in PINS])
    vc.save_prompt_cache(tmp_path / "all.safetensors", [batch.extract(row) for row in PINS])
    for b, loaded in enumerate(vc.load_prompt_cache(tmp_path / "all.safetensors")):
        assert loaded.pinned == (tuple(PINS[b]),)
        assert kept(fed(loaded, 33 + b, 10)) == kept(fed(batch.extract(b), 33 + b, 10))


def test_a_state_whose_pins_contradict_each_other_is_refused() -> None:
    state = cache_of(PINS[0], 1, 20).state
    for bad in ([[[0, 90]]], [[[4, 4]]], [[], []], 7):
        with pytest.raises(ValueError, match=r"contradicts itself|fills the budget"):
            vc.EvictingKVCache.from_state(with_header(state, pinned=bad))


def with_header(state: Any, **changes: Any) -> Any:
    header = json.dumps({**json.loads(state[0]), **changes})
    return (header, *state[1:-1], digest(header, state[1:-1]))


def test_pins_come_before_tokens_and_leave_room() -> None:
    with pytest.raises(ValueError, match="before its first token"):
        cache_of([], 1, 3).pin([(0, 3)])
    with pytest.raises(ValueError, match="raise budget by at least 1"):
        cache_of([], 1).pin([(0, 16)])


@intervals
def test_an_installed_model_keeps_what_is_pinned(tiny_model: Any, interval: int) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=24, pinned=[(5, 11)], interval=interval)
    caches = make_prompt_cache(model)
    for n in (35, 1, 1, 25, 1):
        model(mx.arange(n)[None], cache=caches)
    for cache in caches:
        assert cache.method.settings["pinned"] == [[5, 11]]
        assert cache.method.settings["recent"] == 3 * (24 - 6) // 4
        assert all({*range(4), *range(5, 11)} <= set(head) for head in kept(cache))
    vc.install(model, "h2o", budget=32, pinned=[(5, 11)], interval=interval)
    caches = make_prompt_cache(model)
    for n in (35, 1, 1, 25, 1):
        model(mx.arange(n)[None], cache=caches)
    assert all({*range(4), *range(5, 11)} <= set(head) for cache in caches for head in kept(cache))

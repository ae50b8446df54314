"""Tokens that a cache only appends: what it hands over is what the method makes of them, and it does not change."""

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibrated import codebook_settings, needed_arrays

from velox_cache import EvictingKVCache
from velox_fn import METHODS, Eviction, arrays, kv
from velox_fn.engine.records import statics
from velox_fn.registry import BUILT_IN
from velox_fn.testing import bits

H, D, BUDGET, INTERVAL = 2, 8, 40, 8
_rng = np.random.default_rng(0)
KEYS, VALUES = (mx.array(_rng.standard_normal((1, H, 80, D)).astype(np.float32)) for _ in range(2))


def make(name: str, interval: int, **settings: Any) -> Eviction:
    return BUILT_IN[name].make(budget=BUDGET, interval=interval, **needed_arrays(name), **settings)


def tokens(start: int, stop: int) -> tuple[mx.array, mx.array]:
    return KEYS[:, :, start:stop], VALUES[:, :, start:stop]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in METHODS), ("l2norm", codebook_settings(4, H, D))],
    ids=[*METHODS, "codebooks"],
)
@pytest.mark.parametrize("interval", [1, INTERVAL])
def test_the_record_is_that_of_the_method_and_later_tokens_do_not_change_it(
    name: str, settings: dict[str, Any], interval: int
) -> None:
    method = make(name, interval, **settings)
    cache, state = EvictingKVCache(method), method.init(1, H, D)
    handed = []
    for t in range(60):
        cache.update_and_fetch(*tokens(t, t + 1))
        state, _ = method.update(state, *tokens(t, t + 1))
        if t % 9 == 5:
            handed.append((cache.record, state))
    for record, expected in handed:
        assert statics(record) == statics(expected)
        for leaf, wanted in zip(arrays(record), arrays(expected), strict=True):
            np.testing.assert_array_equal(bits(leaf), bits(wanted))


@pytest.mark.parametrize("interval", [1, INTERVAL])
def test_a_copy_and_the_cache_go_on_apart(interval: int) -> None:
    cache = EvictingKVCache(make("l2norm", interval))
    for t in range(11):
        cache.update_and_fetch(*tokens(t, t + 1))
    twin = copy.deepcopy(cache)
    cache.update_and_fetch(*tokens(11, 12))
    own, _ = twin.update_and_fetch(*tokens(20, 21))
    shared, _ = cache.update_and_fetch(*tokens(12, 13))
    np.testing.assert_array_equal(np.array(own[:, :, -1:]), np.array(KEYS[:, :, 20:21]))
    np.testing.assert_array_equal(np.array(shared), np.array(KEYS[:, :, :13]))
    assert (cache.offset, twin.offset) == (13, 12)


@pytest.mark.parametrize("interval", [1, INTERVAL])
def test_padding_that_comes_token_by_token_is_no_row(interval: int) -> None:
    begun = EvictingKVCache(make("l2norm", interval))
    begun.update_and_fetch(*tokens(0, 3))
    batch = EvictingKVCache.merge([begun, begun])
    batch.prepare(lengths=[1, 3], right_padding=[2, 0])
    for t in (3, 4, 5):
        batch.update_and_fetch(*(mx.repeat(part, 2, axis=0) for part in tokens(t, t + 1)))
    batch.finalize()
    for b, n_tokens in enumerate((4, 6)):
        alone = batch.extract(b)
        assert alone.offset == n_tokens
        np.testing.assert_array_equal(np.array(kv(alone.record)[0]), np.array(KEYS[:, :, :n_tokens]))


@pytest.mark.parametrize("shape", [(2, H, 1, D), (1, H + 1, 1, D), (1, H, 1, D - 1), (1, H, 0, D)])
def test_a_token_that_does_not_fit_is_refused_and_nothing_is_lost(shape: tuple[int, ...]) -> None:
    cache = EvictingKVCache(make("l2norm", INTERVAL))
    for t in range(11):
        cache.update_and_fetch(*tokens(t, t + 1))
    with pytest.raises(ValueError, match=r"batch size|KV heads|value_dim|no token"):
        cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    keys, _ = cache.update_and_fetch(*tokens(11, 12))
    np.testing.assert_array_equal(np.array(keys), np.array(KEYS[:, :, :12]))


@pytest.mark.parametrize("interval", [1, 1000])
def test_a_token_that_is_only_appended_copies_no_rows_and_none_are_held_twice(interval: int) -> None:
    n_rows, wide = 600, 64
    block = mx.zeros((1, H, n_rows, wide))
    mx.eval(block)
    before = mx.get_active_memory()
    cache = EvictingKVCache(BUILT_IN["l2norm"].make(budget=2000, interval=interval))
    mx.eval(cache.update_and_fetch(block, block))

    def one_more() -> None:
        mx.eval(cache.update_and_fetch(block[:, :, :1], block[:, :, :1]))
        cache.make_mask(1)
        assert cache.offset > n_rows

    one_more()  # there is new room
    one_more()
    mx.reset_peak_memory()
    for _ in range(20):
        one_more()
    assert max(mx.get_peak_memory(), mx.get_active_memory()) - before < 1.2 * cache.nbytes

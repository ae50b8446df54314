"""CurDKVKVCache under the documents' names: config, budget, accounting, shapes."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import CurDKVKVCache, KVCacheBuilder, KVCacheConfig, install, uninstall
from velox_fn import curdkv, kept_positions, kv


def cache(**settings):
    prefixed = {f"curdkv_{name}": value for name, value in ({"budget": 16, "n_sink": 2} | settings).items()}
    return CurDKVKVCache(KVCacheConfig(method="curdkv", **prefixed))


def block(n_tokens, *, batch=1, heads=2, head_dim=8, value_dim=8, dtype=mx.float32, seed=0):
    key = mx.random.key(seed)
    keys = mx.random.normal((batch, heads, n_tokens, head_dim), key=key).astype(dtype)
    return keys, mx.random.normal((batch, heads, n_tokens, value_dim), key=mx.random.split(key)[0]).astype(dtype)


def test_config_defaults_are_the_seeds():
    settings = KVCacheConfig(method="curdkv").eviction().settings
    assert (settings["budget"], settings["n_sink"], settings["rank_cap"]) == (512, 4, 16)


def test_config_reaches_the_method():
    config = KVCacheConfig(
        method="curdkv",
        curdkv_budget=64,
        curdkv_n_sink=3,
        curdkv_recent=8,
        curdkv_rank_cap=5,
        curdkv_granularity="token",
        curdkv_window=7,
        curdkv_mean=True,
        curdkv_solver="eigh",
    )
    assert dict(CurDKVKVCache(config).method.settings) == {
        "budget": 64,
        "n_sink": 3,
        "recent": 8,
        "rank_cap": 5,
        "granularity": "token",
        "window": 7,
        "mean": True,
        "solver": "eigh",
        "interval": 1,
        "pinned": [],
    }


def test_builder_makes_one_cache_per_layer(tiny_model):
    config = KVCacheConfig(method="curdkv", head_dim=8, curdkv_budget=16)
    caches = KVCacheBuilder.for_model(tiny_model(), config)
    assert [(type(layer), layer.method.name, layer.method.settings["budget"]) for layer in caches] == [
        (CurDKVKVCache, "curdkv", 16)
    ] * 2


def test_config_of_another_method_is_refused():
    with pytest.raises(ValueError, match="needs method='curdkv', got 'qfilters'"):
        CurDKVKVCache(KVCacheConfig())


@pytest.mark.parametrize("field", ["curdkv_budget", "curdkv_rank_cap"])
def test_setting_that_cannot_work_is_refused_by_the_config(field):
    with pytest.raises(ValueError, match="must be at least 1"):
        KVCacheConfig(method="curdkv", **{field: 0})


def test_sizes_of_calls_do_not_break_the_bound_and_offset_counts_tokens():
    layer = cache()
    for i, size in enumerate([1, 4, 3, 1, 57, 1, 1]):
        layer.update_and_fetch(*block(size, seed=i))
        assert layer.size() <= 16
    assert (layer.offset, layer.tokens_seen, layer.tokens_kept) == (68, 68, 16)


def test_proxy_is_the_default_of_the_named_cache():
    layer, method = cache(), curdkv(budget=16, n_sink=2)
    keys, values = block(60)
    layer.update_and_fetch(keys, values)
    state, _ = method.update(method.init(1, 2, 8), keys, values, queries=keys)
    assert mx.array_equal(kept_positions(layer.record), kept_positions(state)).item()


@pytest.mark.parametrize(("dtype", "itemsize"), [(mx.float16, 2), (mx.bfloat16, 2), (mx.float32, 4)])
def test_kept_bytes_count_key_and_value_rows_in_their_dtype(dtype, itemsize):
    layer = cache()
    layer.update_and_fetch(*block(100, value_dim=6, dtype=dtype))
    assert layer.curdkv_kept_bytes == 2 * 16 * (8 + 6) * itemsize
    assert layer.full_seq_bytes == 2 * 100 * (8 + 6) * itemsize
    assert layer.compression_ratio == pytest.approx(100 / 16)


def test_kept_bytes_leave_tracked_directions_out_and_nbytes_counts_them():
    layer = cache(rank_cap=1)  # D_v = 8 > 4: directions are tracked
    layer.update_and_fetch(*block(100))
    directions = 2 * 8 * 2 * 4
    assert layer.curdkv_kept_bytes == 2 * 16 * (8 + 8) * 4
    assert layer.kept_bytes == layer.curdkv_kept_bytes + directions
    assert layer.nbytes >= layer.kept_bytes


def test_empty_cache_has_no_bytes():
    assert (cache().curdkv_kept_bytes, cache().compression_ratio) == (0, 1.0)


@pytest.mark.parametrize("solver", ["subspace", "eigh"])
@pytest.mark.parametrize("granularity", ["block", "token"])
def test_a_cache_goes_on_from_its_state_as_if_nothing_had_happened(granularity, solver):
    layer = cache(granularity=granularity, solver=solver, rank_cap=1)
    layer.update_and_fetch(*block(40))
    layer.update_and_fetch(*block(1, seed=1))
    revived = CurDKVKVCache.from_state(layer.state)
    for other in (layer, revived):
        other.update_and_fetch(*block(1, seed=2))
        other.update_and_fetch(*block(9, seed=3))
    assert all(mx.array_equal(a, b).item() for a, b in zip(kv(layer.record), kv(revived.record), strict=True))


def test_copies_go_on_by_themselves():
    layer = cache()
    layer.update_and_fetch(*block(40))
    twin = copy.deepcopy(layer)
    twin.update_and_fetch(*block(30, seed=1))
    assert (layer.offset, twin.offset) == (40, 70)


def test_trim_after_eviction_takes_nothing_back():
    layer = cache()
    layer.update_and_fetch(*block(40))
    assert not layer.is_trimmable()
    assert layer.trim(2) == 0


@pytest.mark.parametrize("rank_cap", [1, 16])
def test_merged_rows_keep_what_they_keep_alone(rank_cap):
    layers = [cache(rank_cap=rank_cap) for _ in range(3)]
    for i, size in enumerate([40, 5, 23]):
        layers[i].update_and_fetch(*block(size, seed=i))
    merged = CurDKVKVCache.merge(layers)
    for step in range(20):
        parts = [block(1, seed=100 + 10 * step + i) for i in range(3)]
        for layer, part in zip(layers, parts, strict=True):
            layer.update_and_fetch(*part)
        merged.update_and_fetch(*(mx.concatenate(column) for column in zip(*parts, strict=True)))
    for i, layer in enumerate(layers):
        row = merged.extract(i)
        assert np.array_equal(np.array(kept_positions(row.record)), np.array(kept_positions(layer.record)))


def test_generation_goes_on_under_a_small_budget(tiny_model):
    model = tiny_model()
    install(model, "curdkv", budget=16, queries="proxy")
    try:
        caches = model.make_cache()
        for tokens in (list(range(60)), [1], [2]):
            assert mx.isfinite(model(mx.array([tokens]), cache=caches)).all().item()
        assert [layer.size() for layer in caches] == [16, 16]
    finally:
        uninstall(model)

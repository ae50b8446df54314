"""Every registered method answers whatever the installed mlx_lm asks of a cache.

The names that mlx_lm asks for are read from its source, so that a release that asks for more fails here.
"""

import ast
import copy
import importlib
import inspect
import io
import pickle
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as mlx_caches
import numpy as np
import pytest
from calibrated import needed_arrays

import velox_cache as vc
from velox_fn import METHODS, arrays, kept_positions
from velox_fn.registry import method_factory

PROBED_AND_ABSENT = {"bits", "group_size"}  # mlx_lm takes their absence for "not quantised"
METHOD_NAMES = list(METHODS)


def small(name: str) -> vc.EvictingKVCache:
    return vc.EvictingKVCache(method_factory(name)(budget=40, **needed_arrays(name)))


def block(n_tokens: int, seed: int = 0, batch: int = 1) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    shape = (batch, 2, n_tokens, 8)
    return tuple(mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))  # type: ignore[return-value]


def names_asked_of_caches(source: str) -> set[str]:
    """Attributes read from a loop variable over caches, or from an entry of a list of caches."""
    asked = set()
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        caches = {name for node in ast.walk(scope) for name in _cache_variables(node)}
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and (
                (isinstance(node.value, ast.Name) and node.value.id in caches)
                or (isinstance(node.value, ast.Subscript) and "cache" in ast.unparse(node.value.value).split(".")[-1])
            ):
                asked.add(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
                probed = ast.unparse(node.args[0])
                if probed in caches or "cache" in probed:
                    asked.add(ast.literal_eval(node.args[1]))
    return asked


def _cache_variables(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.For | ast.comprehension):
        over = ast.unparse(node.iter)
        if "cache" in over and ".items()" not in over and "prompt_cache]" not in over:
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name) and len(target.id) <= 2)


def test_scan_finds_the_known_calls_of_the_batch_generator() -> None:
    asked = names_asked_of_caches(inspect.getsource(importlib.import_module("mlx_lm.generate")))
    assert {"merge", "extend", "filter", "extract", "prepare", "finalize", "state", "nbytes"} <= asked


@pytest.mark.parametrize("module", ["mlx_lm.generate", "mlx_lm.server", "mlx_lm.models.cache", "mlx_lm.models.base"])
def test_cache_has_every_name_that_mlx_lm_asks_for(module: str) -> None:
    if module == "mlx_lm.models.cache":  # the functions on prompt caches, not the classes' own insides
        functions = [mlx_caches.save_prompt_cache, mlx_caches.can_trim_prompt_cache, mlx_caches.trim_prompt_cache]
        source = "\n\n".join(inspect.getsource(part) for part in [*functions, mlx_caches.LRUPromptCache])
    else:
        source = inspect.getsource(importlib.import_module(module))
    asked = names_asked_of_caches(source) - PROBED_AND_ABSENT
    assert asked
    assert {name for name in asked if not hasattr(vc.EvictingKVCache, name)} == set()


def test_cache_has_the_public_surface_of_the_base_class() -> None:
    public = {name for name in dir(mlx_caches._BaseCache) if not name.startswith("_")}
    assert {name for name in public if not hasattr(vc.EvictingKVCache, name)} == set()


def test_cache_has_what_plain_and_batched_caches_have() -> None:
    public = {
        name
        for cls in (mlx_caches.KVCache, mlx_caches.BatchKVCache)
        for name in dir(cls)
        if not name.startswith("_") and name not in ("step", "to_quantized")
    }
    assert {name for name in public if not hasattr(vc.EvictingKVCache, name)} == set()


@pytest.mark.parametrize("name", ["bits", "group_size"])
def test_names_that_mean_a_quantised_cache_are_absent(name: str) -> None:
    assert not hasattr(small("qfilters"), name)


def test_cache_is_always_true() -> None:
    # create_attention_mask asks `if cache and hasattr(cache, "make_mask")`: a __len__ of 0 would lose the mask.
    assert bool(small("qfilters"))
    assert not hasattr(vc.EvictingKVCache, "__len__")


def test_signatures_take_what_mlx_lm_passes() -> None:
    inspect.signature(vc.EvictingKVCache.make_mask).bind(None, 5, return_array=True, window_size=None)
    inspect.signature(vc.EvictingKVCache.prepare).bind(None, lengths=[1], right_padding=[0])
    inspect.signature(vc.EvictingKVCache.prepare).bind(None, left_padding=None, lengths=[1], right_padding=[0])


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_state_can_be_read_and_evaluated_before_between_and_after_calls(name: str) -> None:
    cache = small(name)
    for n_tokens in (0, 5, 60, 1, 1, 3):
        if n_tokens:
            cache.update_and_fetch(*block(n_tokens))
        mx.eval([cache.state])
    assert cache.offset == 70


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_rows_stay_within_budget_and_offset_counts_tokens(name: str) -> None:
    cache = vc.EvictingKVCache(method_factory(name)(budget=140, **needed_arrays(name)))  # above any warm-up
    for n_tokens in (1, 4, 3, 1, 257, 1, 1):
        cache.update_and_fetch(*block(n_tokens))
        assert cache.size() <= 140
    assert (cache.offset, cache.size(), cache.tokens_seen, cache.tokens_kept) == (268, 140, 268, 140)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_nbytes_are_those_of_the_arrays_held(name: str) -> None:
    cache = small(name)
    assert cache.nbytes == 0
    cache.update_and_fetch(*block(200))
    assert cache.nbytes == sum(leaf.nbytes for leaf in cache.state[1:-1]) - sum(
        array.nbytes for array in cache.method.params.values()
    )


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_round_trip_through_state_goes_on_alike(name: str) -> None:
    cache = small(name)
    cache.update_and_fetch(*block(200))
    again = vc.EvictingKVCache.from_state(cache.state)
    views = [one.update_and_fetch(*block(1, seed=7)) for one in (cache, again)]
    assert all(mx.array_equal(a, b) for a, b in zip(*views, strict=True))
    assert again.offset == 201


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_assigning_a_used_state_to_a_fresh_cache_goes_on_as_the_used_one(name: str) -> None:
    used, fresh = small(name), small(name)
    used.update_and_fetch(*block(200))
    fresh.state = used.state
    assert fresh.offset == 200
    assert mx.array_equal(kept_positions(fresh.record), kept_positions(used.record))


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_deep_copy_shares_arrays_until_they_differ(name: str) -> None:
    cache = small(name)
    cache.update_and_fetch(*block(200))
    mx.eval([cache.state])
    before = mx.get_active_memory()
    twin = copy.deepcopy(cache)
    assert mx.get_active_memory() == before
    twin.update_and_fetch(*block(1))
    assert (cache.offset, twin.offset) == (200, 201)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_settings_survive_merge_and_extract(name: str) -> None:
    caches = [small(name), small(name)]
    for cache, n_tokens in zip(caches, (5, 200), strict=True):
        cache.update_and_fetch(*block(n_tokens))
    merged = vc.EvictingKVCache.merge(caches)
    alone = [merged.extract(row) for row in range(2)]
    assert [dict(cache.method.settings) for cache in alone] == [dict(cache.method.settings) for cache in caches]
    assert [cache.offset for cache in alone] == [5, 200]


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_batch_rows_are_those_that_each_cache_held_alone(name: str) -> None:
    caches = [small(name), small(name), small(name)]
    for seed, (cache, n_tokens) in enumerate(zip(caches, (5, 200, 150), strict=True)):
        cache.update_and_fetch(*block(n_tokens, seed))
    merged = vc.EvictingKVCache.merge(caches)
    for row, cache in enumerate(caches):
        assert mx.array_equal(kept_positions(merged.extract(row).record), kept_positions(cache.record))


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_trim_after_eviction_returns_zero_and_changes_nothing(name: str) -> None:
    cache = small(name)
    cache.update_and_fetch(*block(200))
    before = kept_positions(cache.record)
    assert not cache.is_trimmable()
    assert cache.trim(2) == 0
    assert cache.offset == 200
    assert mx.array_equal(kept_positions(cache.record), before)


@pytest.mark.parametrize("name", [name for name in METHOD_NAMES if method_factory(name)().static])
def test_trim_before_the_first_eviction_is_exact(name: str) -> None:
    cache, shorter = small(name), small(name)
    keys, values = block(10)
    cache.update_and_fetch(keys, values)
    shorter.update_and_fetch(keys[:, :, :7], values[:, :, :7])
    assert cache.trim(3) == 3
    views = [one.update_and_fetch(*block(1, seed=3)) for one in (cache, shorter)]
    assert all(mx.array_equal(a, b) for a, b in zip(*views, strict=True))


@pytest.mark.parametrize("name", [name for name in METHOD_NAMES if not method_factory(name)().static])
def test_rollback_of_a_method_whose_scores_accumulate_is_refused_with_the_reason(
    name: str, tiny_model: Callable[..., nn.Module]
) -> None:
    with pytest.raises(ValueError, match="rollback"):
        vc.install(tiny_model(), name, budget=40, queries="proxy", rollback=2)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_empty_side_does_not_change_the_dtype(name: str) -> None:
    used, empty = small(name), small(name)
    used.update_and_fetch(*(array.astype(mx.bfloat16) for array in block(20)))
    merged = vc.EvictingKVCache.merge([used])
    merged.extend(vc.EvictingKVCache.merge([empty]))
    keys, _ = merged.update_and_fetch(*(array.astype(mx.bfloat16) for array in block(1, batch=2)))
    assert keys.dtype == mx.bfloat16


def test_window_size_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding window"):
        small("qfilters").make_mask(4, window_size=8)


def test_left_padding_is_refused_at_intervals_and_where_it_is_not_one_number_per_sequence() -> None:
    with pytest.raises(ValueError, match=r"left_padding=\[3\] cannot work with interval=16"):
        vc.EvictingKVCache(method_factory("l2norm")(budget=140, interval=16)).prepare(left_padding=[3])
    with pytest.raises(ValueError, match="left_padding has 2 entries for a batch of 1 sequences"):
        small("qfilters").prepare(left_padding=[0, 3])


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("start", [1, 60])
def test_no_graph_grows_where_attention_ignores_the_view(name: str, start: int) -> None:
    # mlx_lm evaluates tokens only, so nothing asks for rows that no token depends on.
    cache = small(name)
    cache.update_and_fetch(*block(start))
    waiting = []
    for t in range(30):
        cache.update_and_fetch(*block(1, seed=t))
        graph = io.StringIO()
        mx.export_to_dot(graph, *arrays(cache.record))
        waiting.append(graph.getvalue().count("[label"))
    assert len(set(waiting[10:])) == 1, waiting


def test_several_calls_may_stand_in_one_compiled_function() -> None:
    # Nothing may be evaluated while it is traced.
    def seen(keys: mx.array) -> mx.array:
        cache = small("random")
        views = [cache.update_and_fetch(keys[:, :, part], keys[:, :, part]) for part in (slice(3), slice(3, 4))]
        return mx.stack([keys.sum() + values.sum() for keys, values in views]).sum()

    keys, _ = block(4)
    np.testing.assert_allclose(mx.compile(seen)(keys).item(), seen(keys).item(), rtol=1e-5)


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("n_tokens", [0, 10, 60])
def test_a_pickled_cache_goes_on_where_it_stood(name: str, n_tokens: int) -> None:
    cache = small(name)
    if n_tokens:
        cache.update_and_fetch(*block(n_tokens))
    again = pickle.loads(pickle.dumps(cache))
    for seed in range(3):
        views = [one.update_and_fetch(*block(1 + seed, seed)) for one in (cache, again)]
        np.testing.assert_array_equal(np.array(views[0][0]), np.array(views[1][0]))
    np.testing.assert_array_equal(np.array(kept_positions(cache.record)), np.array(kept_positions(again.record)))


def test_a_pickled_batch_and_a_named_form_stay_what_they_are() -> None:
    named = vc.QFiltersKVCache(vc.KVCacheConfig(qfilters_budget=40), filters=mx.ones((2, 8)))
    named.update_and_fetch(*(rows.astype(mx.bfloat16) for rows in block(60)))
    again = pickle.loads(pickle.dumps(vc.QFiltersKVCache.merge([named, named])))
    assert type(again) is vc.QFiltersKVCache
    assert (again.offset.tolist(), again.size(), again.nbytes) == ([60, 60], 40, 2 * again.extract(0).nbytes)
    assert again.record.store.keys.dtype == mx.bfloat16


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_caches_of_one_method_share_nothing_that_changes(name: str) -> None:
    method = small(name).method
    calls = [30, 1, 20, 1, 1]

    def read(cache: vc.EvictingKVCache, seed: int) -> list[np.ndarray]:
        return [np.array(rows) for n in calls for rows in cache.update_and_fetch(*block(n, seed + n))]

    one, other = vc.EvictingKVCache(method), vc.EvictingKVCache(method)
    seen: dict[int, list[np.ndarray]] = {100: [], 200: []}
    for n in calls:  # in turns
        for cache, seed in ((one, 100), (other, 200)):
            seen[seed].extend(np.array(rows) for rows in cache.update_and_fetch(*block(n, seed + n)))
    for seed, views in seen.items():
        for view, alone in zip(views, read(small(name), seed), strict=True):
            np.testing.assert_array_equal(view, alone)

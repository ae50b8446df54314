"""A saved cache in which anything was changed is refused, and says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as mlx_caches
import numpy as np
import pytest
from calibrated import needed_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

import velox_cache as vc
from velox_cache.caches.digest import digest
from velox_fn import METHODS, arrays, curdkv, h2o, l2norm, morphkv, qfilters
from velox_fn.registry import method_factory
from velox_fn.testing import bits

H, D, D_V = 2, 8, 6
FILTERS = mx.array(np.random.default_rng(1).standard_normal((H, D)).astype(np.float32))


def used(method: Any, calls: tuple[int, ...] = (40, 5), dtype: mx.Dtype = mx.float16) -> vc.EvictingKVCache:
    cache, rng = vc.EvictingKVCache(method), np.random.default_rng(0)
    for n_tokens in calls:
        keys, values = (mx.array(rng.standard_normal((1, H, n_tokens, dim))).astype(dtype) for dim in (D, D_V))
        cache.update_and_fetch(keys, values)
    return cache


STATE = used(qfilters(budget=9, n_sink=2, filters=FILTERS)).state
NAMES = ["filters", "keys", "values", "ranks", "offset", "the state's filters", "digest"]


def flipped(array: mx.array, bit: int) -> mx.array:
    raw = np.array(mx.flatten(array).view(mx.uint8))
    raw[bit // 8] ^= 1 << bit % 8
    return mx.array(raw).view(array.dtype).reshape(array.shape)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, len(STATE) - 1), st.data())
def test_any_flipped_bit_of_an_array_is_noticed(index: int, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * STATE[index].nbytes - 1))
    with pytest.raises(ValueError, match="damaged"):
        vc.EvictingKVCache.from_state([*STATE[:index], flipped(STATE[index], bit), *STATE[index + 1 :]])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(STATE[0]) - 1), st.integers(0, 6))
def test_any_flipped_bit_of_the_header_is_noticed(place: int, bit: int) -> None:
    header = STATE[0][:place] + chr(ord(STATE[0][place]) ^ 1 << bit) + STATE[0][place + 1 :]
    with pytest.raises(ValueError, match=r"damaged|no header that can be read|upgrade|older"):
        vc.EvictingKVCache.from_state([header, *STATE[1:]])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.data())
def test_two_flipped_bits_do_not_make_up_for_each_other(index: int, data: st.DataObject) -> None:
    bits = st.integers(0, 8 * STATE[index].nbytes - 1)
    one, other = data.draw(st.lists(bits, min_size=2, max_size=2, unique=True))
    broken = flipped(flipped(STATE[index], one), other)
    assert digest("", [broken]).tolist() != digest("", [STATE[index]]).tolist()


def test_the_digest_is_the_weighted_sum_of_the_words() -> None:
    for dtype in (mx.float16, mx.bfloat16, mx.float32, mx.int32, mx.int64):
        for shape in ((3, 5, 7), (2, 4), (0, 3)):
            array = mx.array(np.random.default_rng(2).integers(-100, 100, shape)).astype(dtype)
            raw = np.array(mx.flatten(array).view(mx.uint8)).tobytes() if array.size else b""
            words = np.frombuffer(raw, np.uint32 if shape[-1] * dtype.size % 4 == 0 else np.uint8).tolist()
            expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
            assert digest("", [array]).tolist()[1] == expected


def test_reading_the_state_waits_for_nothing() -> None:
    cache = used(qfilters(budget=9, n_sink=2, filters=FILTERS))

    def step(keys: mx.array, values: mx.array) -> list[mx.array]:
        cache.update_and_fetch(keys, values)
        return list(cache.state[1:])

    mx.compile(step)(mx.ones((1, H, 1, D), mx.float16), mx.ones((1, H, 1, D_V), mx.float16))  # or it would raise


# A header that was changed together with the digest: the checks by themselves


def forged(state: tuple[Any, ...], change: dict[str, Any], arrays: dict[int, mx.array] | None = None) -> list[Any]:
    """`state` with header fields replaced, by dotted name, and arrays by index, under a digest that fits."""
    header, leaves = json.loads(state[0]), list(state[1:-1])
    for index, array in (arrays or {}).items():
        leaves[index - 1] = array
    header["arrays"] = [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves]
    for name, value in change.items():
        *path, last = name.split(".")
        part = header
        for step in path:
            part = part[step]
        part[last] = value
    text = json.dumps(header)
    return [text, *leaves, digest(text, leaves)]


def test_a_forged_state_without_a_change_loads() -> None:
    assert vc.EvictingKVCache.from_state(forged(STATE, {})).offset == 45


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": [47]},
        {"offsets": [-3]},
        {"offsets": ["45"]},
        {"offsets": [45, 45]},
        {"offsets": 45},
        {"offsets": [2**31]},
        {"batched": 1},
        {"batched": True, "offsets": []},
        {"lengths": [3, 4]},
        {"lengths": ["3"]},
        {"lengths": [-1]},
        {"can_take_back": 3},
        {"can_take_back": "0"},
        {"true_queries": True},
        {"method": "h2o"},
        {"method": 7},
        {"settings": {}},
        {"settings.budget": 10**12},
        {"settings.budget": "9"},
        {"settings.unheard_of": 1},
        {"params": []},
        {"record": None},
        {"record": []},
        {"record.sign": -1},
        {"record.calib_tokens": 45},
        {"record.store.filled": 5},
        {"record.store.filled": 11},
        {"record.store.filled": "9"},
        {"record.store.budget": 10**12},
        {"record.store.warm_up": 100},
        {"record.store.seen_by_all": 44},
        {"record.store.unscored": 3},
        {"record.store.recent": 1},
        {"record.store.ordered": "yes"},
        {"record.store.more": 1},
        {"arrays": []},
    ],
    ids=str,
)
def test_a_header_that_contradicts_its_arrays_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        vc.EvictingKVCache.from_state(forged(STATE, change))


@pytest.mark.parametrize(
    ("method", "calls", "change"),
    [
        (l2norm(budget=9, rollback=3), (40, 5), {"record.store.filled": 11}),
        (
            h2o(budget=16, grace=4),
            (40, 1),
            {"record.store.filled": 16},
        ),  # the landing row is among the 17 that are there
        (morphkv(budget=64, obs_window=4), (40, 5), {"record.store.unscored": 1}),
        (l2norm(budget=9, interval=8), (8, 8, 3), {"record.store.unscored": 1}),
    ],
    ids=["rows kept aside", "landing row", "by attention", "interval"],
)
def test_a_header_that_leaves_rows_out_is_refused(method: Any, calls: tuple[int, ...], change: dict[str, Any]) -> None:
    state = used(method, calls).state
    assert vc.EvictingKVCache.from_state(forged(state, {})).offset == sum(calls)
    with pytest.raises(ValueError, match="contradicts itself"):
        vc.EvictingKVCache.from_state(forged(state, change))


def test_tokens_that_were_taken_back_may_lie_beside_the_rows() -> None:
    for method in (l2norm(budget=64), l2norm(budget=9, rollback=3)):
        cache = used(method, (20, 5))
        cache.trim(3)
        assert vc.EvictingKVCache.from_state(cache.state).offset == 22


@pytest.mark.parametrize("since", [[2, 7], [3, 8]])
def test_boundaries_of_a_batch_are_multiples_of_the_interval(since: list[int]) -> None:
    method = l2norm(budget=16, interval=8)
    batch = vc.EvictingKVCache.merge([used(method, (8, 8, 3)), used(method, (7,))])
    with pytest.raises(ValueError, match="contradicts itself"):
        vc.EvictingKVCache.from_state(forged(batch.state, {"record.store.span.since": since}))


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (2, lambda keys: keys[0]),
        (2, lambda keys: keys.astype(mx.int16)),
        (3, lambda values: values[:, :, :5]),
        (3, lambda values: values[:, :1]),
        (4, mx.zeros_like),
        (4, lambda ranks: ranks.astype(mx.int32)),
        (4, lambda ranks: ranks[..., ::-1]),
        (4, lambda ranks: mx.broadcast_to(ranks[..., :1], ranks.shape)),
        (5, lambda offset: offset + 2),
        (5, lambda offset: offset.astype(mx.int64)),
        (6, lambda filters: filters * float("nan")),
        (6, lambda filters: filters[..., :5]),
    ],
)
def test_arrays_that_contradict_their_header_are_refused(index: int, change: Callable[[mx.array], mx.array]) -> None:
    with pytest.raises(ValueError, match=r"contradicts"):
        vc.EvictingKVCache.from_state(forged(STATE, {}, {index: change(STATE[index])}))


@pytest.mark.parametrize("n_tokens", [(0,), (3,), (9,), (30,), (30, 1, 1), (1,) * 5])
@pytest.mark.parametrize(
    "method",
    [
        l2norm(budget=9, recent=3, rollback=2),
        curdkv(budget=9),
        qfilters(budget=9, calib_tokens=20),
        qfilters(budget=9, n_sink=2, filters=FILTERS),
    ],
    ids=["rollback", "curdkv", "warm-up", "qfilters"],
)
def test_what_was_saved_loads(method: Any, n_tokens: tuple[int, ...]) -> None:
    cache = used(method, () if n_tokens == (0,) else n_tokens)
    again = vc.EvictingKVCache.from_state(cache.state)
    assert (again.offset, again.size()) == (cache.offset, cache.size())


# Files


def saved(folder: Path, model: nn.Module) -> Path:
    vc.install(model, "qfilters", budget=24)
    caches = mlx_caches.make_prompt_cache(model)
    model(mx.array([[(7 * i) % 97 for i in range(40)]]), cache=caches)
    vc.save_prompt_cache(folder / "prompt.safetensors", caches, {"who": "me"})
    return folder / "prompt.safetensors"


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])  # of which one has caches of mlx_lm's own too
def test_any_flipped_bit_of_a_file_is_noticed(
    model_type: str, tmp_path: Path, tiny_model: Callable[..., nn.Module]
) -> None:
    path = saved(tmp_path, tiny_model(model_type))
    whole = path.read_bytes()
    header_size = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    for place in [*range(8), *rng.integers(8, header_size, 90), *rng.integers(header_size, len(whole), 60)]:
        broken = bytearray(whole)
        broken[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"prompt\.safetensors .*(damaged|truncated|upgrade|was not written by)"):
            vc.load_prompt_cache(path)
    path.write_bytes(whole)
    vc.load_prompt_cache(path)


def test_mlx_lms_own_loader_notices_a_flipped_bit(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    path = saved(tmp_path, tiny_model())
    whole = path.read_bytes()
    vc.register_with_mlx_lm()
    start = 8 + int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8:start])
    entries.pop("__metadata__")
    rng = np.random.default_rng(0)
    for first, last in [entry["data_offsets"] for entry in entries.values()]:
        broken = bytearray(whole)
        broken[start + int(rng.integers(first, last))] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        with pytest.raises((ValueError, OverflowError)):  # chr() of mlx_lm's, for what is no letter any more
            mlx_caches.load_prompt_cache(str(path))


def test_a_file_of_the_version_before_is_refused_with_what_to_do(
    tmp_path: Path, tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("velox_cache.caches.prompt_file.FILE_VERSION", 1)
    path = saved(tmp_path, tiny_model())
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"version 1.*compute the cache again"):
        vc.load_prompt_cache(path)


def test_a_state_of_the_format_before_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"format 1.*compute the cache again"):
        vc.EvictingKVCache.from_state(forged(STATE, {"format": 1})[:-1])


@pytest.mark.parametrize("name", METHODS)
def test_a_sequence_that_the_last_token_was_not_for_is_no_damage(name: str) -> None:
    cache = vc.EvictingKVCache.merge([vc.EvictingKVCache(method_factory(name)(budget=40, **needed_arrays(name)))] * 2)
    rng = np.random.default_rng(0)
    cache.prepare(lengths=[50, 61], right_padding=[11, 0])
    for n_tokens in (60, 1):
        cache.update_and_fetch(*(mx.array(rng.standard_normal((2, 2, n_tokens, 8)).astype(np.float32)) for _ in "kv"))
    cache.finalize()
    again = vc.EvictingKVCache.from_state(cache.state)
    for leaf, wanted in zip(arrays(again.record), arrays(cache.record), strict=True):
        np.testing.assert_array_equal(bits(leaf), bits(wanted))

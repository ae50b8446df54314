"""The core with its Metal backend, the kernels emulated: the same rows as with its MLX backend, bit for bit.

Keys and filters are small whole numbers, so that both backends' sums are exact and their scores equal.
"""

from collections.abc import Iterator
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest

from metal_src import Cut, evict_apply, qfilters_score
from velox_cache.doctor.kernel_parity import compare_kernels
from velox_fn import fused_evict, fusion, kept_positions, kv, learned, qfilters

from .capture import capture
from .emulate import bits, emulate

pytestmark = pytest.mark.usefixtures("cxx", "emulated_metal")


@pytest.fixture
def emulated_metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Metal as far as the core can tell: launches run in the emulator, which needs numbers and so no tracing."""
    mx.disable_compile()
    monkeypatch.setattr(import_module("velox_fn.engine.fused_evict"), "metal_available", lambda: True)
    monkeypatch.setattr(import_module("velox_fn.engine.fused_evict"), "kernel_failure", lambda: None)
    monkeypatch.setattr(import_module("velox_fn.engine.fused_evict"), "evict_apply", emulated_evict_apply)
    monkeypatch.setattr(import_module("velox_fn.engine.scorers"), "qfilters_score", emulated_qfilters_score)
    monkeypatch.setattr(import_module("velox_cache.doctor.kernel_parity"), "qfilters_score", emulated_qfilters_score)
    yield
    mx.enable_compile()


def emulated_evict_apply(
    keys: mx.array,
    values: mx.array,
    scores: mx.array,
    ranks: mx.array,
    positions: mx.array,
    cut: Cut,
    *,
    keep: int,
) -> tuple[mx.array, ...]:
    def launch(*arrays: mx.array) -> tuple[mx.array, ...]:
        keys, values, scores, ranks, positions, *parts = arrays
        return evict_apply(keys, values, scores, ranks, positions, Cut(*parts), keep=keep)

    return tuple(emulate(capture(launch, keys, values, scores, ranks, positions, *cut)))


def emulated_qfilters_score(*arrays: mx.array, n_sink: int, recent: int, sign: int) -> mx.array:
    def launch(*arrays: mx.array) -> mx.array:
        return qfilters_score(*arrays, n_sink=n_sink, recent=recent, sign=sign)

    return emulate(capture(launch, *arrays))[0]


def whole_numbers(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.integers(-3, 4, shape).astype(np.float32))


def assert_same_bits(one: tuple[mx.array, ...], other: tuple[mx.array, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "D", "D_v", "budget", "n_sink", "recent"),
    [
        (100, 8, 8, 20, 4, 8),
        (300, 33, 64, 299, 0, 0),
        (300, 64, 33, 1, 0, 0),
        (64, 80, 80, 40, 0, 30),
        (70, 8, 4, 9, 8, 0),
    ],
)
def test_metal_path_matches_pure_mlx_path(
    n: int, D: int, D_v: int, budget: int, n_sink: int, recent: int, dtype: mx.Dtype
) -> None:
    rng = np.random.default_rng(n)
    keys, values = whole_numbers(rng, 2, 2, n, D).astype(dtype), whole_numbers(rng, 2, 2, n, D_v).astype(dtype)
    scores = whole_numbers(rng, 2, 2, n)
    scores = mx.where(mx.abs(scores) == 3, mx.inf * scores, scores)
    positions = mx.broadcast_to(mx.arange(n, dtype=mx.int32), (2, 2, n))
    positions = mx.where(mx.array(rng.random((2, 1, n)) < 0.1), -1, positions)
    real = positions >= 0  # padding holds zeros, as in the core, so that it does not matter which of it stays
    scores = mx.where(real, scores, 0)
    keys, values = (mx.where(real[..., None], array, mx.zeros_like(array)) for array in (keys, values))
    offset = mx.full((2,), n, dtype=mx.int32)
    on_metal, in_mlx = (
        fused_evict(
            keys,
            values,
            scores,
            positions,
            budget=budget,
            n_sink=n_sink,
            recent=recent,
            offset=offset,
            use_metal_kernels=metal,
        )
        for metal in (True, False)
    )
    assert_same_bits(on_metal, in_mlx)


@pytest.mark.parametrize(("sign", "recent", "filtered"), [(1, 0, True), (-1, 5, True), (1, 3, False)])
def test_qfilters_keeps_the_same_rows_on_both_backends(sign: int, recent: int, filtered: bool) -> None:
    rng = np.random.default_rng(1)
    keys, values = whole_numbers(rng, 2, 3, 90, 16), whole_numbers(rng, 2, 3, 90, 8)
    filters = whole_numbers(rng, 3, 16) if filtered else None
    kept = []
    for use_metal_kernels in (True, False):
        method = qfilters(
            budget=24, n_sink=2, recent=recent, sign=sign, filters=filters, calib_tokens=40,
            use_metal_kernels=use_metal_kernels,
        )  # fmt: skip
        state = method.init(2, 3, 16, 8, mx.float32)
        for start, stop in ((0, 50), (50, 57), (57, 90)):
            state, _ = method.update(state, keys[:, :, start:stop], values[:, :, start:stop])
        kept.append((*kv(state), kept_positions(state)))
    if filtered:
        assert_same_bits(*kept)
    else:  # the estimated direction is no whole number: sums round differently, in the last bits
        np.testing.assert_array_equal(np.array(kept[0][2]), np.array(kept[1][2]))


@pytest.mark.parametrize("terms", ["projection+key_difference", "key_norm+norm_product", "value_norm+recency"])
@pytest.mark.parametrize("combine", ["max", "sum"])
def test_fusion_keeps_the_same_rows_on_both_backends(terms: str, combine: str) -> None:
    rng = np.random.default_rng(2)
    keys, values = whole_numbers(rng, 2, 3, 90, 16), whole_numbers(rng, 2, 3, 90, 8)
    directions = {"projection": "filters", "key_difference": "mean_keys"}
    given = {directions[term]: whole_numbers(rng, 3, 16) for term in terms.split("+") if term in directions}
    given |= {"means": whole_numbers(rng, 3, 2), "deviations": mx.abs(whole_numbers(rng, 3, 2)) + 1}
    kept = []
    for use_metal_kernels in (True, False):
        method = fusion(
            budget=24, n_sink=2, recent=5, terms=terms, combine=combine, use_metal_kernels=use_metal_kernels, **given
        )
        state = method.init(2, 3, 16, 8, mx.float32)
        for start, stop in ((0, 50), (50, 57), (57, 90)):
            state, _ = method.update(state, keys[:, :, start:stop], values[:, :, start:stop])
        kept.append((*kv(state), kept_positions(state)))
    assert_same_bits(*kept)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_learned_keeps_the_same_rows_on_both_backends(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(3)
    keys, values = whole_numbers(rng, 2, 3, 90, 16).astype(dtype), whole_numbers(rng, 2, 3, 90, 8).astype(dtype)
    keys = mx.where(mx.arange(90)[:, None] == 60, mx.array(mx.inf, dtype), keys)
    given = {
        "score_keys": whole_numbers(rng, 3, 16),
        "score_key_squares": 2.0 ** whole_numbers(rng, 3, 16),  # exact, and so are quotients by them
        "score_values": whole_numbers(rng, 3, 8),
        "score_value_squares": -(2.0 ** whole_numbers(rng, 3, 8)),
        "score_age": mx.array([0.0, 24, 48]),
    }
    kept = []
    for use_metal_kernels in (True, False):
        method = learned(budget=24, n_sink=2, recent=5, use_metal_kernels=use_metal_kernels, **given)
        state = method.init(2, 3, 16, 8, dtype)
        for start, stop in ((0, 50), (50, 57), (57, 90)):
            state, _ = method.update(state, keys[:, :, start:stop], values[:, :, start:stop])
        kept.append((*kv(state), kept_positions(state)))
    assert_same_bits(*kept)
    assert not (kept[0][2] == 60).any().item()


def test_the_doctor_finds_the_kernels_right() -> None:
    found = list(compare_kernels([(1, 1, 1, 1, 1), (2, 3, 70, 33, 80)]))
    assert [parity.differing for parity in found] == [0] * 9


def test_the_doctor_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arrays: mx.array, n_sink: int, recent: int, sign: int) -> mx.array:
        return emulated_qfilters_score(*arrays, n_sink=n_sink, recent=recent, sign=-sign)

    monkeypatch.setattr(import_module("velox_cache.doctor.kernel_parity"), "qfilters_score", wrong)
    assert all(parity.differing > 0 for parity in compare_kernels([(2, 3, 70, 33, 80)]) if "score" in parity.kernel)

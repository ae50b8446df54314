"""Rows stored by codebooks, against VecInfer written out in numpy."""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_fn import attend, dequantised, kept_bytes, l2norm, made_codebooks, vector_quantised
from velox_fn.engine.codebooks import whole
from velox_fn.testing.trials import bits

H, D, D_V, G = 2, 16, 32, 3


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows_of(seed: int, n_rows: int, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Keys with one large channel, values of sizes that differ."""
    keys, values = normal(seed, batch, H, n_rows, D), normal(seed + 1, batch, H, n_rows, D_V)
    keys[..., 3] = 8 + keys[..., 3]
    return keys, values * np.exp(normal(seed + 2, batch, H, n_rows, 1))


@functools.cache
def books_of(n_bits: int) -> dict[str, mx.array]:
    keys, values = rows_of(50, 300)
    return made_codebooks(mx.array(keys[0]), mx.array(values[0]), n_bits)


def hadamard(width: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2)
    return matrix


def oracle(rows: np.ndarray, entries: mx.array) -> np.ndarray:
    """Rows [B,H,n,W] cut into parts, each the nearest entry of its head, one by one, at the row's size."""
    known = np.array(entries.astype(mx.float16).astype(mx.float32), np.float64)
    d, found = known.shape[2], np.zeros(rows.shape)
    for b, h, n in np.ndindex(rows.shape[:3]):
        size = np.sqrt(np.mean(rows[b, h, n].astype(np.float64) ** 2))
        for start in range(0, rows.shape[3], d):
            part = rows[b, h, n, start : start + d] / size
            steps = np.round(part * 128)
            nearest = np.argmin(((np.round(known[h] * 128) - steps) ** 2).sum(1))
            found[b, h, n, start : start + d] = known[h, nearest] * size
    return found


@pytest.mark.parametrize("n_bits", [1, 2, 4])
def test_rows_read_as_the_nearest_entries(n_bits: int) -> None:
    books = books_of(n_bits)
    widths = vector_quantised(l2norm(), codebooks=n_bits, **books).widths
    keys, values = rows_of(1, 12, batch=2)
    found = widths.read(*widths.stored(mx.array(keys), mx.array(values)))
    smoothing = np.array(books["key_smoothing"])[:, None]
    turned = oracle(keys / smoothing @ hadamard(D), books["key_codebook"])
    np.testing.assert_allclose(np.array(found[0]), turned @ hadamard(D) * smoothing, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.array(found[1]), oracle(values, books["value_codebook"]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_attention_is_that_over_the_rows_read_back(n_bits: int, dtype: mx.Dtype) -> None:
    method = vector_quantised(l2norm(budget=24, recent=4), codebooks=n_bits, **books_of(n_bits))
    keys, values = (mx.array(rows).astype(dtype) for rows in rows_of(7, 60, batch=2))
    queries = mx.array(normal(4, 2, H * G, 1, D)).astype(dtype)
    state = method.init(2, H, D, D_V, dtype)
    state, _ = method.update(state, keys[:, :, :59], values[:, :, :59])
    state, view = method.update(state, keys[:, :, 59:], values[:, :, 59:])
    output = attend(state, queries, view, scale=0.3)
    assert output.dtype == dtype
    k, v = (np.array(half.astype(mx.float32), np.float64) for half in dequantised(state, view))
    q = np.array(queries.astype(mx.float32), np.float64)
    off = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 4e-2}[dtype] * np.abs(v).max()
    for b, head in np.ndindex(2, H * G):
        logits = k[b, head // G] @ q[b, head, 0] * 0.3
        weights = np.exp(logits - logits.max())
        expected = weights / weights.sum() @ v[b, head // G]
        np.testing.assert_allclose(np.array(output[b, head, 0].astype(mx.float32)), expected, atol=off)


def test_a_row_has_the_same_codes_alone_and_in_a_block() -> None:
    widths = vector_quantised(l2norm(), codebooks=2, **books_of(2)).widths
    keys, values = (mx.array(rows) for rows in rows_of(9, 200))
    block = widths.stored(keys, values)
    for n in range(0, 200, 7):
        for half, alone in zip(block, widths.stored(keys[:, :, n : n + 1], values[:, :, n : n + 1]), strict=True):
            for part, own in zip(half, alone, strict=True):
                assert np.array_equal(bits(part[:, :, n : n + 1]), bits(own))


def test_whole_numbers_add_up_exactly_in_float32() -> None:
    most = np.array(whole(mx.array([100.0, -100.0, 0.51 / 128])))
    assert most.tolist() == [1023, -1023, 1]
    assert 8 * most[0] ** 2 < 2**23


def test_rows_that_are_not_finite_and_rows_of_zeros_show() -> None:
    widths = vector_quantised(l2norm(), codebooks=2, **books_of(2)).widths
    keys, values = rows_of(11, 4)
    keys[0, :, 1, 5], values[0, :, 2, 5] = np.nan, np.inf
    keys[0, :, 3], values[0, :, 3] = 0, 0
    k, v = (np.array(half) for half in widths.read(*widths.stored(mx.array(keys), mx.array(values))))
    assert np.isfinite(k).all(-1).tolist() == [[[True, False, True, True]] * H]
    assert np.isfinite(v).all(-1).tolist() == [[[True, True, False, True]] * H]
    assert not k[0, :, 3].any()
    assert not v[0, :, 3].any()


def test_codebooks_are_the_same_every_time_and_better_than_their_start() -> None:
    books, again = books_of(2), books_of.__wrapped__(2)
    assert all(np.array_equal(np.array(books[name]), np.array(again[name])) for name in books)
    keys, values = rows_of(50, 300)
    np.testing.assert_allclose(
        np.array(books["key_smoothing"]), np.sqrt(np.abs(keys[0]).max(axis=1)), rtol=1e-6
    )  # equation of the smoothing factors
    drawn = {**books, "value_codebook": mx.array(normal(3, H, 256, 4))}
    errors = []
    for given in (books, drawn):
        widths = vector_quantised(l2norm(), codebooks=2, **given).widths
        read = widths.read(*widths.stored(mx.array(keys), mx.array(values)))[1]
        errors.append(float(np.mean((np.array(read) - values) ** 2)))
    assert errors[0] < 0.8 * errors[1]


def test_bytes_are_those_of_codes_sizes_and_codebooks() -> None:
    method = vector_quantised(l2norm(budget=24), codebooks=2, **books_of(2))
    state = method.init(1, H, D, D_V, mx.float16)
    keys, values = (mx.array(rows).astype(mx.float16) for rows in rows_of(7, 60))
    state, _ = method.update(state, keys, values)
    shared = H * (4 * D + 2 * 2 * 256 * 4)
    assert kept_bytes(state) == H * 24 * ((D + D_V) // 4 + 2 * 2) + shared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codebooks": 3}, "codebooks must be one of 1, 2, 4, got 3"),
        ({"codebooks": 2, "key_codebook": None}, "codebooks=2 needs key_smoothing, key_codebook, value_codebook"),
        ({"codebooks": 4}, r"codebooks of 4 bits have entries \[2, 256, 2\], got \[\[2, 256, 4\]"),
        ({"codebooks": 2, "key_smoothing": mx.ones((H, 12))}, "keys of width 12 .* a power of two"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vector_quantised(l2norm(), **{**books_of(2), **arguments})


def test_rows_of_other_heads_and_rows_stored_twice_are_refused() -> None:
    method = vector_quantised(l2norm(), codebooks=2, **books_of(2))
    with pytest.raises(ValueError, match="the codebooks are of 2 heads with keys of width 16"):
        method.init(1, 4, D)
    with pytest.raises(ValueError, match="a row is quantised once"):
        vector_quantised(method, codebooks=2, **books_of(2))

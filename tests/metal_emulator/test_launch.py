"""The launcher refuses what the kernels cannot take, and finds exact cuts without reading an array."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_src import evict_apply, metal_available, qfilters_score, threshold_and_quota

from . import oracles
from .cases import EvictCase, ScoreCase, Shape

SHAPE = Shape(2, 2, 6, 4, 3)


def test_the_kernels_are_unavailable_without_an_apple_gpu() -> None:
    assert metal_available() == mx.metal.is_available()


@pytest.mark.parametrize(
    ("index", "array", "complaint"),
    [
        (0, mx.zeros((2, 2, 6)), r"keys must have shape \[B,H,n,D\]"),
        (0, mx.zeros((2, 2, 6, 4), mx.int32), "keys must be float32, float16 or bfloat16"),
        (0, mx.zeros((2, 2, 0, 4)), "no empty axis"),
        (1, mx.zeros((2, 2, 5, 3)), "must agree in B, H and n"),
        (2, mx.zeros((2, 2, 5)), r"filters must be mlx.core.float32 of shape \[2, 2, 4\]"),
        (2, mx.zeros((2, 2, 4), mx.float16), "filters must be mlx.core.float32"),
        (3, mx.zeros((2, 2, 6), mx.int64), "positions must be mlx.core.int32"),
        (4, mx.zeros((), mx.int32), r"offset must be .* shape \[2\]"),
    ],
)
def test_score_arguments_that_do_not_fit_are_refused(index: int, array: mx.array, complaint: str) -> None:
    arrays = list(ScoreCase.draw(SHAPE, 0).arrays)
    arrays[index] = array
    with pytest.raises(ValueError, match=complaint):
        qfilters_score(*arrays, n_sink=0, recent=0, sign=1)


def test_more_rows_than_a_grid_counts_are_refused_with_words() -> None:
    n = 2**26
    rows, positions = mx.zeros((1, 1, n, 1), mx.float16), mx.zeros((1, 1, n), mx.int32)  # lazy: they take no memory
    with pytest.raises(ValueError, match="one dispatch takes at most"):
        qfilters_score(rows, rows, mx.zeros((1, 1, 1)), positions, mx.zeros((1,), mx.int32), n_sink=0, recent=0, sign=1)


@pytest.mark.parametrize(
    ("sign", "threads", "complaint"), [(0, 256, "sign must be"), (1, 48, "threads"), (1, 2048, "threads")]
)
def test_score_settings_that_cannot_work_are_refused(sign: int, threads: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        qfilters_score(*ScoreCase.draw(SHAPE, 0).arrays, n_sink=0, recent=0, sign=sign, threads=threads)


@pytest.mark.parametrize("keep", [0, 7])
def test_keep_outside_the_rows_is_refused(keep: int) -> None:
    case = EvictCase.draw(SHAPE, 3, 0)
    with pytest.raises(ValueError, match=r"keep must lie in 1\.\.6"):
        threshold_and_quota(*case.arrays[3:], keep)
    with pytest.raises(ValueError, match=r"keep must lie in 1\.\.6"):
        evict_apply(*case.arrays, case.cut(), keep=keep)


def test_a_cut_of_another_shape_is_refused() -> None:
    case = EvictCase.draw(SHAPE, 3, 0)
    cut = case.cut()._replace(tie_quota=mx.zeros((2,), mx.int32))
    with pytest.raises(ValueError, match=r"cut\.tie_quota must be"):
        evict_apply(*case.arrays, cut, keep=3)


ranks = st.sampled_from([-np.inf, -1.0, 0.0, 2.0, np.inf])


@given(st.lists(st.tuples(ranks, st.booleans()), min_size=1, max_size=30), st.data())
def test_a_cut_keeps_exactly_the_rows_of_the_rule(rows: list[tuple[float, bool]], data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, len(rows)))
    values = [rank for rank, _ in rows]
    positions = [-1 if padding else row for row, (_, padding) in enumerate(rows)]
    arrays = mx.array([[values]]), mx.array([[positions]], mx.int32)
    threshold, ties, padding = (np.array(part).item() for part in threshold_and_quota(*arrays, keep))
    real = [row for row, position in enumerate(positions) if position >= 0]
    kept = [row for row in real if values[row] > threshold]
    kept += [row for row in real if values[row] == threshold][:ties]
    kept = sorted(kept) + [row for row, position in enumerate(positions) if position < 0][:padding]
    assert kept == oracles.survivors(values, positions, keep)


def test_finding_the_cut_traces_under_compile() -> None:
    case = EvictCase.draw(SHAPE, 3, 0)
    compiled = mx.compile(lambda ranks, positions: tuple(threshold_and_quota(ranks, positions, 3)))
    for traced, direct in zip(compiled(*case.arrays[3:]), case.cut(), strict=True):
        assert mx.array_equal(traced, direct)

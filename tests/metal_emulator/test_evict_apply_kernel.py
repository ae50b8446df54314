"""The emulated apply kernel equals a numpy oracle, and the MLX selection path, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .cases import DTYPES, EvictCase, Shape, draw_positions
from .emulate import bits, emulate

pytestmark = pytest.mark.usefixtures("cxx")


@st.composite
def cases(draw: st.DrawFn) -> EvictCase:
    shape = Shape(
        B=draw(st.integers(1, 2)),
        H=draw(st.integers(1, 3)),
        n=draw(st.integers(1, 200)),
        D=draw(st.sampled_from([1, 8, 33, 64, 80, 128, 256])),
        D_v=draw(st.sampled_from([1, 8, 33, 64, 80, 128, 256])),
        dtype=draw(st.sampled_from(DTYPES)),
        threads=draw(st.sampled_from([32, 64, 256])),
    )
    keep = draw(st.sampled_from([1, max(shape.n - 1, 1), shape.n]) | st.integers(1, shape.n))
    return EvictCase.draw(
        shape,
        keep,
        draw(st.integers(0, 2**32 - 1)),
        levels=draw(st.sampled_from([0, 3, 1000])),
        protected=draw(st.sampled_from([0.0, 0.2, 1.0])),
        padding=draw(st.sampled_from([0.0, 0.2, 0.9])),
    )


@settings(deadline=None, max_examples=150)
@given(cases())
def test_apply_kernel_equals_its_oracle(case: EvictCase) -> None:
    for kept, expected in zip(emulate(case.captured()), case.expected(), strict=True):
        np.testing.assert_array_equal(bits(kept), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "keep", "protected", "padding"),
    [
        (Shape(1, 1, 1, 1, 1), 1, 0.0, 0.0),
        (Shape(1, 2, 100, 64, 64), 99, 0.0, 0.0),
        (Shape(2, 3, 150, 33, 80), 1, 0.1, 0.0),
        (Shape(2, 2, 257, 128, 64), 100, 0.5, 0.2),
        (Shape(1, 3, 65, 8, 1), 64, 0.0, 0.9),
    ],
    ids=["one row", "evict one", "keep one", "protected and padding", "mostly padding"],
)
def test_metal_path_matches_pure_mlx_path(
    shape: Shape, keep: int, protected: float, padding: float, dtype: mx.Dtype
) -> None:
    """Emulated here; ``test_on_metal.py`` holds the same claim on hardware."""
    shape = Shape(shape.B, shape.H, shape.n, shape.D, shape.D_v, dtype)
    case = EvictCase.draw(shape, keep, 11, protected=protected, padding=padding).with_zeroed_padding()
    for kept, expected in zip(emulate(case.captured()), case.mlx_path(), strict=True):
        np.testing.assert_array_equal(bits(kept), bits(expected))


def kept_positions(ranks: list[float], positions: list[int], keep: int) -> list[int]:
    shape = Shape(1, 1, len(ranks), 8, 8, threads=32)
    grid = (np.array([[ranks]], np.float32), np.array([[positions]], np.int32))
    case = EvictCase.of(shape, keep, np.random.default_rng(0), *grid)
    kept: list[int] = np.array(emulate(case.captured())[3])[0, 0].tolist()
    return kept


def test_tied_scores_do_not_overflow_budget() -> None:
    assert kept_positions([1.0] * 100, list(range(100)), 10) == list(range(10))


def test_all_protected_rows_tie_at_infinity() -> None:
    ranks = [float("inf")] * 50 + [0.0] * 50
    assert kept_positions(ranks, list(range(100)), 40) == list(range(40))


def test_ties_go_to_the_lowest_position_across_chunks() -> None:
    ranks = [0.0] * 30 + [5.0] * 10 + [0.0] * 30
    assert kept_positions(ranks, list(range(70)), 42) == [*range(40), 40, 41]


def test_padding_loses_to_a_row_that_is_not_finite() -> None:
    assert kept_positions([-np.inf, -np.inf, -np.inf, 1.0], [-1, 4, -1, 9], 2) == [4, 9]


def test_padding_comes_last_when_it_must_stay() -> None:
    assert kept_positions([0.0, 1.0, 0.0, -np.inf], [-1, 4, -1, 9], 3) == [4, 9, -1]


def test_an_evicted_set_larger_than_any_threadgroup_is_exact() -> None:
    rng = np.random.default_rng(5)
    shape = Shape(1, 1, 5000, 1, 1, threads=1024)
    ranks = rng.integers(0, 50, (1, 1, 5000)).astype(np.float32)
    case = EvictCase.of(shape, 3333, rng, ranks, draw_positions(rng, shape, 0.0))
    for kept, expected in zip(emulate(case.captured()), case.expected(), strict=True):
        np.testing.assert_array_equal(bits(kept), expected)

"""The emulated score kernel equals a numpy float32 oracle of its order, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .cases import DTYPES, ScoreCase, Shape
from .emulate import bits, emulate

pytestmark = pytest.mark.usefixtures("cxx")

shapes = st.builds(
    Shape,
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    n=st.integers(1, 70),
    D=st.sampled_from([1, 8, 33, 64, 80, 128, 256]),
    D_v=st.sampled_from([1, 8, 33, 64, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([32, 64, 256]),
)
seeds = st.integers(0, 2**32 - 1)


def assert_equals_oracle(case: ScoreCase) -> None:
    (ranks,) = emulate(case.captured())
    np.testing.assert_array_equal(bits(ranks), case.expected())


@settings(deadline=None, max_examples=150)
@given(shapes, seeds, st.integers(0, 5), st.integers(0, 5), st.sampled_from([1, -1]), st.sampled_from([0.0, 0.1, 0.5]))
def test_score_kernel_equals_its_oracle(
    shape: Shape, seed: int, n_sink: int, recent: int, sign: int, odd: float
) -> None:
    assert_equals_oracle(ScoreCase.draw(shape, seed, n_sink=n_sink, recent=recent, sign=sign, odd=odd))


def ranks_of(keys: mx.array, values: mx.array, **changes: object) -> list[float]:
    """Emulated ranks of one head whose filter is all ones, positions 0, 1, 2, ..."""
    n, D = keys.shape
    arrays = (
        keys[None, None],
        values[None, None],
        mx.ones((1, 1, D)),
        mx.arange(n, dtype=mx.int32)[None, None],
        mx.array([n], mx.int32),
    )
    case = ScoreCase(**({"arrays": arrays, "n_sink": 0, "recent": 0, "sign": 1, "threads": 32} | changes))  # type: ignore[arg-type]
    (ranks,) = emulate(case.captured())
    head: list[float] = np.array(ranks)[0, 0].tolist()
    return head


def test_scores_do_not_depend_on_the_block_size() -> None:
    whole = ScoreCase.draw(Shape(1, 2, 40, 80, 16, mx.bfloat16), 3, recent=0)
    keys, values, filters, positions, offset = whole.arrays
    pieces = []
    for start, stop in ((0, 1), (1, 17), (17, 40)):
        rows = slice(start, stop)
        arrays = (keys[:, :, rows], values[:, :, rows], filters, positions[:, :, rows], offset)
        piece = ScoreCase(arrays, whole.n_sink, 0, whole.sign, 256)
        pieces.append(bits(emulate(piece.captured())[0]))
    np.testing.assert_array_equal(np.concatenate(pieces, axis=2), whole.expected())


def test_a_non_finite_value_element_makes_the_row_lose() -> None:
    values = mx.zeros((3, 40)).at[1, 37].add(mx.nan)
    assert ranks_of(mx.ones((3, 8)), values) == [8.0, -np.inf, 8.0]


def test_an_overflowing_score_makes_the_row_lose() -> None:
    keys = mx.array([[3e38, 3e38], [-3e38, -3e38], [1.0, 1.0]])
    assert ranks_of(keys, mx.ones((3, 2))) == [-np.inf, -np.inf, 2.0]


def test_protected_rows_stay_even_when_not_finite() -> None:
    keys = mx.full((4, 8), mx.nan)
    assert ranks_of(keys, mx.ones((4, 8)), n_sink=1, recent=1) == [np.inf, -np.inf, -np.inf, np.inf]


def test_stored_scores_ignore_the_recent_window() -> None:
    assert ranks_of(mx.ones((3, 8)), mx.ones((3, 8)), n_sink=1, recent=0) == [np.inf, 8.0, 8.0]


def test_negative_zero_becomes_positive_zero() -> None:
    (rank,) = ranks_of(mx.zeros((1, 8)), mx.ones((1, 8)), sign=-1)
    assert not np.signbit(rank)

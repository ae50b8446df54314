"""Inputs for the two kernels: drawn from a seed, with the awkward rows planted."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_src import Cut, evict_apply, qfilters_score, threshold_and_quota
from velox_fn.engine.select import pack_ranks, survivors

from . import oracles
from .capture import CapturedKernel, capture
from .emulate import bits

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Shape:
    """Sizes of one case; ``threads`` per threadgroup decides how many chunks the rows fall into."""

    B: int
    H: int
    n: int
    D: int
    D_v: int
    dtype: mx.Dtype = mx.float32
    threads: int = 64


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Any bit pattern of ``dtype``: every NaN payload, infinity, subnormal number and zero of either sign."""
    drawn = rng.integers(0, 256, (*shape, dtype.size), dtype=np.uint8)
    return mx.array(drawn).view(dtype).reshape(shape)


def draw_positions(rng: np.random.Generator, shape: Shape, padding: float) -> npt.NDArray[np.int32]:
    """Ascending positions with gaps; a share of the rows, anywhere, is padding (-1)."""
    steps = rng.integers(1, 3, (shape.B, shape.H, shape.n))
    positions = (np.cumsum(steps, axis=-1) - steps[..., :1]).astype(np.int32)
    positions[rng.random(positions.shape) < padding] = -1
    return positions


@dataclass(frozen=True)
class ScoreCase:
    """Arguments of ``qfilters_score``."""

    arrays: tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
    n_sink: int
    recent: int
    sign: int
    threads: int

    @staticmethod
    def draw(
        shape: Shape, seed: int, *, n_sink: int = 2, recent: int = 3, sign: int = 1, odd: float = 0.1
    ) -> "ScoreCase":
        """Normal keys, values and filters; a share ``odd`` of the rows each holds an awkward key, value or position."""
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((shape.B, shape.H, shape.n, shape.D)).astype(np.float32)
        values = rng.standard_normal((shape.B, shape.H, shape.n, shape.D_v)).astype(np.float32)
        for rows in (keys, values):
            at = rng.random(rows.shape[:3]) < odd
            column = rng.integers(rows.shape[-1])
            rows[at, column] = rng.choice(np.array([np.nan, np.inf, -np.inf, 6e4, -6e4, 1e-7], np.float32), at.sum())
        keys[rng.random(keys.shape[:3]) < odd] = -0.0  # scores of both zeros
        positions = draw_positions(rng, shape, odd)
        filters = rng.standard_normal((shape.B, shape.H, shape.D)).astype(np.float32)
        arrays = (
            mx.array(keys).astype(shape.dtype),
            mx.array(values).astype(shape.dtype),
            mx.array(filters),
            mx.array(positions),
            mx.array((positions.max(axis=(1, 2)) + rng.integers(1, 4, shape.B)).astype(np.int32)),
        )
        return ScoreCase(arrays, n_sink, recent, sign, shape.threads)

    def launch(self, *arrays: mx.array) -> mx.array:
        keys, values, filters, positions, offset = arrays
        return qfilters_score(
            keys,
            values,
            filters,
            positions,
            offset,
            n_sink=self.n_sink,
            recent=self.recent,
            sign=self.sign,
            threads=self.threads,
        )

    def captured(self) -> CapturedKernel:
        return capture(self.launch, *self.arrays)

    def expected(self) -> npt.NDArray[np.unsignedinteger]:
        """The oracle's ranking values, as bits."""
        keys, values, filters, positions, offset = self.arrays
        ranks = oracles.ranking_values(
            np.array(keys.astype(mx.float32)),
            np.array(values.astype(mx.float32)),
            np.array(filters),
            np.array(positions),
            np.array(offset),
            n_sink=self.n_sink,
            recent=self.recent,
            sign=self.sign,
        )
        return ranks.view(np.uint32)


@dataclass(frozen=True)
class EvictCase:
    """Arguments of ``evict_apply``; the cut comes from ``threshold_and_quota``."""

    arrays: tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
    keep: int
    threads: int

    @staticmethod
    def draw(
        shape: Shape, keep: int, seed: int, *, levels: int = 5, protected: float = 0.1, padding: float = 0.1
    ) -> "EvictCase":
        """Keys, values and scores of any bits; ranks of few ``levels``, so that they tie, with both infinities."""
        rng = np.random.default_rng(seed)
        rows = (shape.B, shape.H, shape.n)
        ranks = rng.integers(-levels, levels, rows, endpoint=True).astype(np.float32)
        ranks[rng.random(rows) < protected] = np.inf
        ranks[rng.random(rows) < protected] = -np.inf
        return EvictCase.of(shape, keep, rng, ranks, draw_positions(rng, shape, padding))

    @staticmethod
    def of(
        shape: Shape, keep: int, rng: np.random.Generator, ranks: npt.NDArray[np.float32], positions: oracles.Ints
    ) -> "EvictCase":
        """A case with the given ranks and positions."""
        arrays = (
            random_bits(rng, (*ranks.shape, shape.D), shape.dtype),
            random_bits(rng, (*ranks.shape, shape.D_v), shape.dtype),
            random_bits(rng, ranks.shape, mx.float32),
            mx.array(ranks),
            mx.array(positions.astype(np.int32)),
        )
        return EvictCase(arrays, keep, shape.threads)

    def with_zeroed_padding(self) -> "EvictCase":
        """The case as the core makes it: padding rows hold zeros, so that it does not matter which of them stay."""
        *rows, ranks, positions = self.arrays
        real = positions >= 0
        keys, values = (mx.where(real[..., None], array, mx.zeros_like(array)) for array in rows[:2])
        return replace(self, arrays=(keys, values, mx.where(real, rows[2], 0), ranks, positions))

    def cut(self) -> Cut:
        _, _, _, ranks, positions = self.arrays
        return threshold_and_quota(ranks, positions, self.keep)

    def launch(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        keys, values, scores, ranks, positions, *cut = arrays
        return evict_apply(keys, values, scores, ranks, positions, Cut(*cut), keep=self.keep, threads=self.threads)

    def captured(self) -> CapturedKernel:
        return capture(self.launch, *self.arrays, *self.cut())

    def expected(self) -> list[npt.NDArray[np.unsignedinteger]]:
        """The oracle's keys, values, scores and positions, as bits."""
        keys, values, scores, ranks, positions = self.arrays
        B, H, _ = ranks.shape
        rows = np.array(
            [
                [
                    oracles.survivors(np.array(ranks)[b, h].tolist(), np.array(positions)[b, h].tolist(), self.keep)
                    for h in range(H)
                ]
                for b in range(B)
            ]
        )
        gathered = [np.take_along_axis(bits(array), rows[..., None], 2) for array in (keys, values)]
        return gathered + [np.take_along_axis(bits(array), rows, 2) for array in (scores, positions)]

    def mlx_path(self) -> list[mx.array]:
        """The same rows by the core's selection rule and gathers: tokens in temporal order, padding last."""
        keys, values, scores, ranks, positions = self.arrays
        rows = survivors(pack_ranks(ranks, positions), self.keep)
        padding_last = mx.where(mx.take_along_axis(positions, rows, -1) < 0, 2**30, 0) + rows
        rows = mx.take_along_axis(rows, mx.argsort(padding_last, -1), -1)
        gathered = [mx.take_along_axis(array, rows[..., None], 2) for array in (keys, values)]
        return gathered + [mx.take_along_axis(array, rows, 2) for array in (scores, positions)]

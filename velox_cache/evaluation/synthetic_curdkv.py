"""CurDKV against H2O on made-up rows of two classes, where it is known which ones attention's output needs.

Two geometries. `planted_value_divergence`: all keys lie along one direction, so no method that looks at keys alone can
tell the classes apart; rows of class 1 have large values, those of class 2 almost none. `correlated`: one importance
per token drives both how far its key reaches along the direction and how large its value is, so keys tell as well.
Classes alternate. Both methods get the keys as stand-ins for queries, one token at a time as in decoding; CurDKV also
as one block.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from velox_fn import curdkv, h2o, kept_positions
from velox_fn.engine.eviction import Eviction

GEOMETRIES = ("planted_value_divergence", "correlated")
HEAD_DIM, N_SINK = 16, 2


@dataclass(frozen=True)
class SyntheticRow:
    """One method on all draws of one setting."""

    geometry: str
    n_tokens: int
    budget: int
    arm: str
    class_2_share: float  # of the kept rows, mean over draws; lower is better, 0.5 is blind
    class_2_share_worst: float  # of any draw
    elapsed_ms: float  # of all draws; differs from run to run


def synthetic_curdkv(
    lengths: Sequence[int] = (40, 80), budgets: Sequence[int] = (6, 8), n_seeds: int = 8
) -> list[SyntheticRow]:
    """All arms on all geometries, lengths and budgets. The same arguments give the same numbers, but for times."""
    return [
        _row(geometry, n_tokens, budget, arm, n_seeds)
        for geometry in GEOMETRIES
        for n_tokens in lengths
        for budget in budgets
        for arm in ("curdkv", "curdkv, one block", "h2o")
    ]


def planted_classes(geometry: str, n_tokens: int, seed: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1,1,N,D]; tokens at even positions are of class 1, at odd ones of class 2."""
    rng = np.random.default_rng([seed, n_tokens, GEOMETRIES.index(geometry)])
    direction = rng.normal(size=HEAD_DIM)
    noise = rng.normal(size=(2, n_tokens, HEAD_DIM))
    first = np.arange(n_tokens) % 2 == 0
    if geometry == "planted_value_divergence":
        reach, size = np.ones(n_tokens), np.where(first, 1.0, 1e-3)
    else:
        reach = size = np.where(first, rng.uniform(0.7, 1.0, n_tokens), rng.uniform(0.1, 0.4, n_tokens))
    keys = reach[:, None] * direction + 0.05 * noise[0]
    values = size[:, None] * noise[1]
    return mx.array(keys[None, None].astype(np.float32)), mx.array(values[None, None].astype(np.float32))


def class_2_share(method: Eviction, keys: mx.array, values: mx.array, *, block: bool) -> float:
    """Share of class 2 among the rows that `method` keeps of keys and values, taken in as one block or one by one."""
    state = method.init(1, 1, HEAD_DIM)
    size = keys.shape[2] if block else 1
    for at in range(0, keys.shape[2], size):
        state, _ = method.update(state, keys[:, :, at : at + size], values[:, :, at : at + size])
    return float((kept_positions(state) % 2).mean())


def _row(geometry: str, n_tokens: int, budget: int, arm: str, n_seeds: int) -> SyntheticRow:
    method = h2o(budget=budget, n_sink=N_SINK, grace=0) if arm == "h2o" else curdkv(budget=budget, n_sink=N_SINK)
    start = time.perf_counter()
    shares = [
        class_2_share(method, *planted_classes(geometry, n_tokens, seed), block="block" in arm)
        for seed in range(n_seeds)
    ]
    elapsed = 1000 * (time.perf_counter() - start)
    return SyntheticRow(geometry, n_tokens, budget, arm, float(np.mean(shares)), max(shares), elapsed)

"""CurDKV's two solvers on made-up rows: how far the kept rows drift apart when directions are tracked.

Keys and values are Gaussian; from one dimension of the values to the next their size falls by `decay`. Queries are
Gaussian too, or the keys stand in for them: then a row takes nearly all of its own attention, and what is left to tell
the other directions by is small. Rows come one at a time, as in decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from velox_fn import arrays, curdkv_init, kept_positions
from velox_fn.engine.dynamic import land
from velox_fn.methods.curdkv import curdkv_observe

HEADS, HEAD_DIM = 8, 128


@dataclass(frozen=True)
class SolverRow:
    """Both solvers on the same rows."""

    queries: str  # "own" or "keys"
    decay: float  # of the values' size; 1 is a flat spectrum
    budget: int
    evictions: int
    kept_by_one_alone: float  # rows that one solver keeps and the other does not, mean over heads
    most: int  # of any head


def synthetic_solver(
    decays: Sequence[float] = (1.0, 0.95, 0.9),
    *,
    budget: int = 64,
    evictions: int = 80,
    recent: int = 16,
    seed: int = 0,
) -> list[SolverRow]:
    """Kept rows of `solver="subspace"` against `solver="eigh"`. The same arguments give the same rows."""
    rng = np.random.default_rng(seed)
    queries, keys, noise = rng.normal(size=(3, 1, HEADS, budget + evictions, HEAD_DIM)).astype(np.float32)
    found = []
    for name, observed in (("own", queries), ("keys", keys)):
        for decay in decays:
            values = noise * (decay ** np.arange(HEAD_DIM)).astype(np.float32)
            exact, tracked = (_kept(solver, budget, recent, observed, keys, values) for solver in ("eigh", "subspace"))
            alone = [len(one - other) for one, other in zip(tracked, exact, strict=True)]
            found.append(SolverRow(name, decay, budget, evictions, float(np.mean(alone)), max(alone)))
    return found


def _kept(solver: str, budget: int, recent: int, *block: npt.NDArray[np.float32]) -> list[set[int]]:
    """The positions that each head keeps of queries, keys and values [1,H,N,D]."""
    queries, keys, values = map(mx.array, block)
    state = curdkv_init(1, HEADS, HEAD_DIM, budget=budget, recent=recent, solver=solver)
    for at in range(keys.shape[2]):
        one = slice(at, at + 1)
        landed, _ = land(state, keys[:, :, one], values[:, :, one])
        state = curdkv_observe(landed, queries[:, :, one], HEAD_DIM**-0.5)
        mx.eval(arrays(state))
    return [set(head.tolist()) for head in np.array(kept_positions(state))[0]]

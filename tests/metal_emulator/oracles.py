"""What the kernels must compute, written in numpy from the design alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]


def ordered_dot(keys: Floats, filters: Floats) -> Floats:
    """``<filter, key>`` in the kernel's order: 32 strided partial sums, then a halving tree. Every step in float32."""
    partial = np.zeros((*keys.shape[:-1], 32), np.float32)
    for d in range(keys.shape[-1]):
        partial[..., d % 32] += keys[..., d] * filters[..., d]
    while partial.shape[-1] > 1:
        half = partial.shape[-1] // 2
        partial = partial[..., :half] + partial[..., half:]
    return partial[..., 0]


def ranking_values(
    keys: Floats,
    values: Floats,
    filters: Floats,
    positions: Ints,
    offset: Ints,
    *,
    n_sink: int,
    recent: int,
    sign: int,
) -> Floats:
    """Scores with the special rows put in their places, last rule written last."""
    with np.errstate(all="ignore"):
        scores = np.float32(sign) * ordered_dot(keys, filters[:, :, None, :])
    scores[scores == 0] = 0.0
    scores[~np.isfinite(scores)] = -np.inf
    scores[~np.isfinite(keys).all(-1) | ~np.isfinite(values).all(-1)] = -np.inf
    scores[positions < n_sink] = np.inf
    if recent:
        scores[positions >= offset[:, None, None] - recent] = np.inf
    scores[positions < 0] = -np.inf
    return scores


def survivors(ranks: Sequence[float], positions: Sequence[int], keep: int) -> list[int]:
    """Rows of one head that stay: tokens in temporal order, then padding."""
    tokens = [row for row, position in enumerate(positions) if position >= 0]
    padding = [row for row, position in enumerate(positions) if position < 0]
    best = sorted(tokens, key=lambda row: (-ranks[row], positions[row]))[:keep]
    return sorted(best, key=lambda row: positions[row]) + padding[: keep - len(best)]

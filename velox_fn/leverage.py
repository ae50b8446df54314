"""Leverage scores of attention-weighted values: how much each row says along the block's leading directions.

For A = diag(weights) V with singular values s and left vectors U, row i scores sum_{j<=r} s_j^2 U_ij^2, normalised to
sum 1. No singular value decomposition is needed: with W the r leading eigenvectors of A^T A, that is |A_i W|^2, and
when r is at least the rank it is |A_i|^2.
"""

import mlx.core as mx

from velox_fn import checks

_SMALLEST = 2e-38  # about the least normal float32


def leverage_scores(weights: mx.array, values: mx.array, rank_cap: int = 16) -> mx.array:
    """Energy-weighted leverage float32 [..., n] of the rows of diag(weights) V; sums to 1, or all 0 for a zero block.

    weights [..., n]; values [..., n, D_v], any float dtype; rank_cap: leading directions that count. A row whose weight
    or value is not finite scores 0 and does not touch the others. Lazy: nothing is evaluated.

    Source: the statistical leverage scores of Mahoney and Drineas, "CUR matrix decompositions for improved data
    analysis" (PNAS 2009), equation 3. Differs from it: directions count by their energy s_j^2, since with a rank of n
    or more the plain scores of all rows are equal.

    The eigenvectors are found in float64: float32 picks another victim in about 1 of 1,000 steps on real values.

    Raises ValueError when rank_cap < 1.
    """
    checks.whole_number("rank_cap", rank_cap, 1)
    n_rows, value_dim = values.shape[-2:]
    weighted = _bounded_rows(weights.astype(mx.float32), values.astype(mx.float32))
    if rank_cap >= min(n_rows, value_dim):
        energy = mx.square(weighted).sum(-1)
    elif n_rows < value_dim:
        squares, left = _leading(weighted @ weighted.swapaxes(-1, -2), rank_cap)
        energy = (mx.square(left) * squares[..., None, :]).sum(-1)
    else:
        _, right = _leading(weighted.swapaxes(-1, -2) @ weighted, rank_cap)
        energy = mx.square(weighted @ right).sum(-1)
    total = energy.sum(-1, keepdims=True)
    return energy / mx.where(total > 0, total, 1.0)


def _bounded_rows(weights: mx.array, values: mx.array) -> mx.array:
    """diag(weights) V over its largest entry, so that no square overflows; rows that are not finite become 0."""
    size = mx.abs(values).max(axis=-1)
    sound = mx.isfinite(weights + size)
    weights = _over_largest(mx.where(sound, weights, 0.0), mx.array(1.0))
    weights = _over_largest(weights, mx.where(sound, size, 0.0))
    return weights[..., None] * mx.where(sound[..., None], values, 0.0)


def _over_largest(weights: mx.array, sizes: mx.array) -> mx.array:
    """Weights [..., n] over the largest of |weights| * sizes along the last axis; as they are when that is zero."""
    largest = (mx.abs(weights) * sizes).max(axis=-1, keepdims=True)
    return weights / mx.where(largest > _SMALLEST, largest, 1.0)


def _leading(gram: mx.array, rank: int) -> tuple[mx.array, mx.array]:
    """The largest eigenvalues float32 [..., rank] of a symmetric matrix and their vectors [..., m, rank]."""
    with mx.stream(mx.cpu):  # GPUs have neither an eigensolver nor float64
        squares, vectors = mx.linalg.eigh(gram.astype(mx.float64))
        return squares[..., -rank:].astype(mx.float32), vectors[..., -rank:].astype(mx.float32)

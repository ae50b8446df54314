"""Leverage scores of attention-weighted values: how much each row says along the block's leading directions.

For A = diag(weights) V with singular values s and left vectors U, row i scores sum_{j<=r} s_j^2 U_ij^2, normalised to
sum 1. No singular value decomposition is needed: with W the r leading eigenvectors of A^T A, that is |A_i W|^2. When r
is at least the matrix's rank it is |A_i|^2.

Source: the statistical leverage scores of Mahoney and Drineas, "CUR matrix decompositions for improved data analysis"
(PNAS 2009), equation 3.

Differs from it: directions count by their energy s_j^2. Without that, n or more directions score all rows alike.
"""

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.widening import widened

_SMALLEST = 2e-38  # about the least normal float32
_ROUNDS = 4  # of subspace iteration per step


def leverage_scores(weights: mx.array, values: mx.array, rank_cap: int = 16) -> mx.array:
    """Energy-weighted leverage of the rows of diag(weights) V.

    A row whose weight or value is not finite scores 0 and does not touch the others. Nothing is evaluated.

    Args:
        weights: [...,n].
        values: [...,n,D_v], any float dtype.
        rank_cap: leading directions that count.

    Returns:
        float32 [...,n]. Sums to 1, or is all 0 for a block of zeros.

    Raises:
        ValueError: rank_cap is below 1.
    """
    rank_cap = checks.whole_number("rank_cap", rank_cap, 1)
    n_rows, value_dim = values.shape[-2:]
    weighted = weighted_rows(weights, values)
    if rank_cap >= min(n_rows, value_dim):
        return _shares(mx.square(weighted).sum(-1))
    if n_rows < value_dim:
        squares, left = _eigh(weighted @ weighted.swapaxes(-1, -2), rank_cap)
        return _shares((mx.square(left) * squares[..., None, :]).sum(-1))
    return leverage_along(weighted, leading_directions(gram(weighted), rank_cap))


def weighted_rows(weights: mx.array, values: mx.array) -> mx.array:
    """A = diag(weights) V float32 [..., n, D_v] over its largest entry, so that no square overflows.

    Rows that are not finite become 0.
    """
    return _weighted(weights, values)


@mx.compile
def _weighted(weights: mx.array, values: mx.array) -> mx.array:
    weights, size = weights.astype(mx.float32), select.largest_magnitude(values).astype(mx.float32)
    sound = mx.isfinite(weights + size)
    weights = _over_largest(mx.where(sound, weights, 0.0), mx.array(1.0))
    weights = _over_largest(weights, mx.where(sound, size, 0.0))
    return weights[..., None] * mx.where(sound[..., None], widened(values), 0.0)


def gram(weighted: mx.array) -> mx.array:
    """A^T A float32 [..., D_v, D_v] of A [..., n, D_v]."""
    return weighted.swapaxes(-1, -2) @ weighted


def leverage_along(weighted: mx.array, directions: mx.array) -> mx.array:
    """Leverage float32 [..., n] of the rows of A [..., n, D_v] along orthonormal directions [..., D_v, r]."""
    return _shares(mx.square(weighted @ directions).sum(-1))


def leading_directions(gram: mx.array, count: int) -> mx.array:
    """The eigenvectors float32 [..., D_v, count] of a symmetric matrix with the largest eigenvalues, these last.

    Found in float64: float32 picks another victim in about 1 of 1,000 steps on real values.
    """
    return _eigh(gram, count)[1]


def tracked_directions(gram: mx.array, directions: mx.array) -> mx.array:
    """`leading_directions` from those of a similar matrix, [..., D_v, count], by subspace iteration.

    An error shrinks by the ratio of the eigenvalue after the last tracked to the one of interest in each of four
    rounds: track twice as many as are used.
    """
    with mx.stream(mx.cpu):  # GPUs have no QR and no eigensolver
        for _ in range(_ROUNDS - 1):
            directions = mx.linalg.qr(gram @ directions)[0]
        image = gram @ directions
        _, turn = mx.linalg.eigh(directions.swapaxes(-1, -2) @ image)
        # The image of the Ritz vectors is the last round. It is orthogonal up to the square of the error that is left.
        image = image @ turn
        length = mx.linalg.norm(image, axis=-2, keepdims=True)
        return image / mx.where(length > 0, length, 1.0)


def _eigh(gram: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The largest eigenvalues float32 [..., count] of a symmetric matrix, and their vectors [..., m, count]."""
    with mx.stream(mx.cpu):  # GPUs have neither an eigensolver nor float64
        squares, vectors = mx.linalg.eigh(gram.astype(mx.float64))
        return squares[..., -count:].astype(mx.float32), vectors[..., -count:].astype(mx.float32)


def _over_largest(weights: mx.array, sizes: mx.array) -> mx.array:
    """Weights [..., n] over the largest of |weights| * sizes along the last axis; as they are when that is zero."""
    largest = (mx.abs(weights) * sizes).max(axis=-1, keepdims=True)
    return weights / mx.where(largest > _SMALLEST, largest, 1.0)


def _shares(energy: mx.array) -> mx.array:
    total = energy.sum(-1, keepdims=True)
    return energy / mx.where(total > 0, total, 1.0)

"""The filter direction that is left when there are no query activations: from the keys themselves."""

import mlx.core as mx


def estimate_filter_dir(keys: mx.array) -> mx.array:
    """Leading axis of variation of keys [...,N,D], any float dtype; a unit vector, float32 [...,D].

    The top right singular vector of the mean-centred keys, by `eigh` of their Gram matrix in float64. Not the paper's
    filter (arXiv:2503.02812 uses queries): it finds an axis, not which end of it matters, so its sign says nothing.
    Here the entry of largest magnitude is made positive, for a result that does not depend on the LAPACK in use.
    Centring removes a pure drift, and with it all that such a head could tell.

    Rows with a NaN or infinite entry are left out. Keys that do not vary (or none that are finite) give an arbitrary
    but finite unit vector, so this never raises for what keys hold, and never waits for them.

    Raises ValueError when keys have fewer than two dimensions, or N or D is 0.
    """
    if keys.ndim < 2 or 0 in keys.shape[-2:]:
        raise ValueError(f"keys must be [...,N,D] with N and D at least 1, got {tuple(keys.shape)}")
    with mx.stream(mx.cpu):
        rows = keys.astype(mx.float64)
        finite = mx.isfinite(rows).all(-1, keepdims=True)
        zero = mx.zeros((), mx.float64)
        rows = mx.where(finite, rows, zero)
        n_finite = mx.maximum(finite.sum(-2, keepdims=True), 1).astype(mx.float64)
        centred = mx.where(finite, rows - rows.sum(-2, keepdims=True) / n_finite, zero)
        # One memory layout, whatever view the keys came in, so that the product sums in one order.
        centred = mx.contiguous(centred)
        _, axes = mx.linalg.eigh(centred.swapaxes(-1, -2) @ centred)
        leading = axes[..., -1]  # eigh sorts ascending
        largest = mx.take_along_axis(leading, mx.abs(leading).argmax(-1, keepdims=True), axis=-1)
        return mx.where(largest < 0, -leading, leading).astype(mx.float32)

"""Sums from which the mean and the deviation of every static score follow, in one pass over the text.

Some scores are known row by row, and are summed as they come, with their squares. Others project keys on a direction
that is known only at the end: for any direction f the projections <k, f> have mean <m, f> and variance f^T C f, with m
and C the mean and covariance of the keys, and so the sums of k and of k k^T are all it takes. KeyDiff's score is minus
such a projection, of keys at unit norm. All sums merge by addition, across texts and processes.
"""

import mlx.core as mx

from velox_fn.engine.records import record
from velox_fn.engine.scorers import MLX_SUMS, SCORERS, unit_keys

SUMMED = tuple(name for name, scorer in SCORERS.items() if not scorer.takes)
"""The terms whose scores are summed themselves."""

_ROUNDING = 1e-12  # of a second moment in float64: a variance below it is that of a score that does not vary


@record
class TermSums:
    """Sums over the rows of one layer, float64 (on the CPU stream: GPUs have none), per KV head."""

    keys: mx.array  # [H, D]: sum of k
    key_gram: mx.array  # [H, D, D]: sum of k k^T
    unit_keys: mx.array  # [H, D]: the same of keys at unit norm
    unit_key_gram: mx.array  # [H, D, D]
    scores: mx.array  # [H, len(SUMMED)]
    squares: mx.array  # [H, len(SUMMED)]: sum of the squared scores


def no_term_sums(n_kv_heads: int, head_dim: int) -> TermSums:
    """The sums over no row."""
    with mx.stream(mx.cpu):
        square, one_each = (n_kv_heads, head_dim, head_dim), (n_kv_heads, len(SUMMED))
        return TermSums(
            keys=mx.zeros((n_kv_heads, head_dim), mx.float64),
            key_gram=mx.zeros(square, mx.float64),
            unit_keys=mx.zeros((n_kv_heads, head_dim), mx.float64),
            unit_key_gram=mx.zeros(square, mx.float64),
            scores=mx.zeros(one_each, mx.float64),
            squares=mx.zeros(one_each, mx.float64),
        )


def with_rows(sums: TermSums, keys: mx.array, values: mx.array, first_position: int) -> TermSums:
    """The sums over keys [1,H,S,D] and values [1,H,S,D_v] too, which stand at positions from `first_position` on."""
    positions = mx.arange(first_position, first_position + keys.shape[2], dtype=mx.int32)[None, None]
    scores = [SCORERS[name].score(keys, values, positions, (), MLX_SUMS)[0] for name in SUMMED]
    unit = unit_keys(keys[0])
    with mx.stream(mx.cpu):
        rows, unit_rows = keys[0].astype(mx.float64), unit.astype(mx.float64)
        exact = mx.stack(scores, axis=-1).astype(mx.float64)  # [H, S, terms]
        return TermSums(
            keys=sums.keys + rows.sum(1),
            key_gram=sums.key_gram + rows.swapaxes(-1, -2) @ rows,
            unit_keys=sums.unit_keys + unit_rows.sum(1),
            unit_key_gram=sums.unit_key_gram + unit_rows.swapaxes(-1, -2) @ unit_rows,
            scores=sums.scores + exact.sum(1),
            squares=sums.squares + mx.square(exact).sum(1),
        )


def term_moments(sums: TermSums, count: mx.array, filters: mx.array, mean_keys: mx.array) -> tuple[mx.array, mx.array]:
    """Means and deviations float32 [H,T] of the terms in the order of SCORERS.

    count: rows, float64 []. filters, mean_keys float32 [H,D]: the directions.
    """
    with mx.stream(mx.cpu):
        moments = {
            "projection": _of_projections(sums.keys, sums.key_gram, filters.astype(mx.float64)),
            "key_difference": _of_projections(sums.unit_keys, sums.unit_key_gram, -mean_keys.astype(mx.float64)),
        }
        moments |= {name: (sums.scores[:, t], sums.squares[:, t]) for t, name in enumerate(SUMMED)}
        means, seconds = (mx.stack([moments[name][i] for name in SCORERS], axis=-1) / count for i in (0, 1))
        variances = seconds - mx.square(means)
        varying = variances > _ROUNDING * seconds
        deviations = mx.sqrt(mx.where(varying, variances, mx.zeros((), mx.float64)))
        return means.astype(mx.float32), deviations.astype(mx.float32)


def _of_projections(total: mx.array, gram: mx.array, directions: mx.array) -> tuple[mx.array, mx.array]:
    """The sums of the projections on directions [H,D] and of their squares, each [H]."""
    return (total * directions).sum(-1), ((gram * directions[:, None]).sum(-1) * directions).sum(-1)

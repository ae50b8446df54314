"""The normal equations of the learned score, as sums: over rows, blocks and processes.

Features of a row are [k, k^2, v, v^2], its target is that of `row_worth`, both less their mean over the block, since
rows compete with those near them. Some blocks are held out; a regression is fitted to the sums over the others and
judged by the sums over these: correlations follow from second moments alone. All sums merge by addition.
"""

import mlx.core as mx

from velox_cache.calibration.row_worth import AGES, RowWorth
from velox_fn.engine.records import record


@record
class ScoreSums:
    """Sums over the rows of one layer, float64 (on the CPU stream: GPUs have none), per KV head.

    Second axis: 0, blocks to fit on; 1, blocks held out. F = 2 (D + D_v) features.
    """

    gram: mx.array  # [H, 2, F, F]: sum of x x^T
    cross: mx.array  # [H, 2, F]: sum of x y^T
    squares: mx.array  # [H, 2]: sum of y^2
    by_age: mx.array  # [H, len(AGES) - 1]: attention to rows of such an age, over all blocks
    n_pairs: mx.array  # [H, len(AGES) - 1]
    head_dim: int  # D


def no_score_sums(n_kv_heads: int, head_dim: int, value_dim: int) -> ScoreSums:
    """The sums over no block."""
    n_features, n_ages = 2 * (head_dim + value_dim), len(AGES) - 1
    with mx.stream(mx.cpu):
        return ScoreSums(
            gram=mx.zeros((n_kv_heads, 2, n_features, n_features), mx.float64),
            cross=mx.zeros((n_kv_heads, 2, n_features), mx.float64),
            squares=mx.zeros((n_kv_heads, 2), mx.float64),
            by_age=mx.zeros((n_kv_heads, n_ages), mx.float64),
            n_pairs=mx.zeros((n_kv_heads, n_ages), mx.float64),
            head_dim=head_dim,
        )


def with_worth(sums: ScoreSums, block: RowWorth, *, held_out: bool) -> ScoreSums:
    """The sums over one more block. Its own are of float32, which is exact enough for rows less their mean."""
    half = int(held_out)
    keys, values = block.keys, block.values
    rows = mx.concatenate([keys, mx.square(keys), values, mx.square(values)], axis=-1)
    rows, worth = rows - rows.mean(1, keepdims=True), block.worth - block.worth.mean(1, keepdims=True)
    across = rows.swapaxes(1, 2)
    added = (across @ rows, (across @ worth[..., None])[..., 0], mx.square(worth).sum(1))
    with mx.stream(mx.cpu):
        gram, cross, squares = (
            _added_to(whole, half, part.astype(mx.float64))
            for whole, part in zip((sums.gram, sums.cross, sums.squares), added, strict=True)
        )
        return ScoreSums(
            gram=gram,
            cross=cross,
            squares=squares,
            by_age=sums.by_age + block.by_age.astype(mx.float64),
            n_pairs=sums.n_pairs + block.n_pairs.astype(mx.float64),
            head_dim=sums.head_dim,
        )


def _added_to(whole: mx.array, half: int, part: mx.array) -> mx.array:
    beside = mx.zeros_like(part)
    return whole + mx.stack([beside, part] if half else [part, beside], axis=1)

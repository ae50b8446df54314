"""The normal equations of the learned score, as sums: over rows, texts and processes.

Features of a row are [k, k^2, v, v^2], its targets those of `row_worth`, both less their mean over the text, since rows
compete with those of their own text. Every fourth text is held out; a regression is fitted to the sums over the others
and judged by the sums over these: correlations follow from second moments alone. All sums merge by addition.
"""

import mlx.core as mx

from velox_cache.calibration.row_worth import AGES, RowWorth
from velox_cache.calibration.score_choice import TARGETS
from velox_fn.engine.records import record

HELD_OUT_EVERY = 4


@record
class ScoreSums:
    """Sums over the rows of one layer, float64 (on the CPU stream: GPUs have none), per KV head.

    Second axis: 0, texts to fit on; 1, texts held out. F = 2 (D + D_v) features, T targets.
    """

    gram: mx.array  # [H, 2, F, F]: sum of x x^T
    cross: mx.array  # [H, 2, F, T]: sum of x y^T
    squares: mx.array  # [H, 2, T, T]: sum of y y^T
    by_age: mx.array  # [H, len(AGES) - 1]: attention to rows of such an age, over all texts
    n_pairs: mx.array  # [H, len(AGES) - 1]
    head_dim: int  # D


def no_score_sums(n_kv_heads: int, head_dim: int, value_dim: int) -> ScoreSums:
    """The sums over no text."""
    n_features, n_targets, n_ages = 2 * (head_dim + value_dim), len(TARGETS), len(AGES) - 1
    with mx.stream(mx.cpu):
        return ScoreSums(
            gram=mx.zeros((n_kv_heads, 2, n_features, n_features), mx.float64),
            cross=mx.zeros((n_kv_heads, 2, n_features, n_targets), mx.float64),
            squares=mx.zeros((n_kv_heads, 2, n_targets, n_targets), mx.float64),
            by_age=mx.zeros((n_kv_heads, n_ages), mx.float64),
            n_pairs=mx.zeros((n_kv_heads, n_ages), mx.float64),
            head_dim=head_dim,
        )


def with_text(sums: ScoreSums, text: RowWorth, *, held_out: bool) -> ScoreSums:
    """The sums over one more text."""
    half = int(held_out)
    with mx.stream(mx.cpu):
        keys, values, worth = (part.astype(mx.float64) for part in (text.keys, text.values, text.worth))
        rows = mx.concatenate([keys, mx.square(keys), values, mx.square(values)], axis=-1)
        rows, worth = rows - rows.mean(1, keepdims=True), worth - worth.mean(1, keepdims=True)
        added = (rows.swapaxes(-1, -2) @ rows, rows.swapaxes(-1, -2) @ worth, worth.swapaxes(-1, -2) @ worth)
        gram, cross, squares = (
            _added_to(whole, half, part)
            for whole, part in zip((sums.gram, sums.cross, sums.squares), added, strict=True)
        )
        return ScoreSums(
            gram=gram,
            cross=cross,
            squares=squares,
            by_age=sums.by_age + text.by_age.astype(mx.float64),
            n_pairs=sums.n_pairs + text.n_pairs.astype(mx.float64),
            head_dim=sums.head_dim,
        )


def _added_to(whole: mx.array, half: int, part: mx.array) -> mx.array:
    beside = mx.zeros_like(part)
    return whole + mx.stack([beside, part] if half else [part, beside], axis=1)

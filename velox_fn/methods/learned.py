"""Learned: score rows by a fitted function of the key, the value and the age.

This project's own; its nearest relatives are KVzap (a map of the hidden state) and KVP (arXiv:2602.10238, a network of
key and value). A row with key k and value v at position p scores

    s = sum_d (f_d + e_d k_d) k_d  +  sum_d (g_d + c_d v_d) v_d  +  a p / budget

with numbers per KV head that `velox calibrate` fits in closed form to what rows turned out to be worth
(docs/learned.md has the derivation). They are fixed, so the whole is static: the kept set is the same however tokens
are split into calls, and a step costs little more than that of one projection.

Attention falls with age about as a power of it, a slope per logarithm. A static score can only fall in proportion, so
the slope is taken where it decides: at ages of about a budget.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.fused_evict import resolve_metal
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.scorers import head_by_head, metal_projection
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, RowScores, static_eviction
from velox_fn.engine.widening import widened

OF_ROWS = ("score_keys", "score_key_squares", "score_values", "score_value_squares")
"""The arguments [H,D] and [H,D_v], in the order of the formula: f, e, g, c."""
LEARNED = (*OF_ROWS, "score_age")
"""All arguments that a calibration brings."""
RECENT_SHARE = 0.5
"""The share of the budget that `install` protects as recent. Less than usual, since age has a term of its own."""


def learned(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    score_keys: mx.array | None = None,
    score_key_squares: mx.array | None = None,
    score_values: mx.array | None = None,
    score_value_squares: mx.array | None = None,
    score_age: mx.array | None = None,
    rollback: int = 0,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction:
    """A fitted score of key, value and age. `install` brings the arrays from a calibration.

    Source: this project's own, no paper (docs/learned.md).

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        score_keys: float32 [H,D], the weights of k.
        score_key_squares: float32 [H,D], the weights of k^2.
        score_values: float32 [H,D_v], the weights of v.
        score_value_squares: float32 [H,D_v], the weights of v^2.
        score_age: float32 [H], what a row gains per budget of positions that it is younger. Not negative.
        rollback: tokens that can be taken back after evictions.
        use_metal_kernels: for the score. True or False; None uses them where they run.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        A static `Eviction`. Without the arrays its `init` raises ValueError.

    Raises:
        ValueError: a count cannot work; an array is not finite or does not fit the others; the arrays would score every
            row of a head alike.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import learned
        >>> keys, values = mx.ones((2, 64)), mx.zeros((2, 64))
        >>> method = learned(
        ...     budget=256,
        ...     score_keys=keys,
        ...     score_key_squares=0 * keys,
        ...     score_values=values,
        ...     score_value_squares=values,
        ...     score_age=mx.ones((2,)),
        ... )
        >>> method.static
        True
    """
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    given = dict(
        zip(LEARNED, (score_keys, score_key_squares, score_values, score_value_squares, score_age), strict=True)
    )
    missing = [name for name, array in given.items() if array is None]
    params = _checked_arrays({name: array for name, array in given.items() if array is not None})
    plain = static_eviction(
        "learned",
        _SCORES[resolve_metal(use_metal_kernels)],
        budget=budget,
        n_sink=n_sink,
        recent=recent,
        rollback=rollback,
        # The eviction kernel's ties go to the lower position. Scores are still taken by the kernel.
        use_metal_kernels=False,
        params={} if missing else {**params, "score_age": params["score_age"] / budget},  # per position
        value_params=("score_values", "score_value_squares"),
    )
    if not missing:
        return at_intervals(pinning(dataclasses.replace(plain, params=params), pinned), interval)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"learned needs {', '.join(missing)}, which come from a calibration: run `velox "
            "calibrate`, and give what it makes as calibration= to install, or --calibration"
        )

    return dataclasses.replace(at_intervals(pinning(plain, pinned), interval), init=refuse, params=params)


def _checked_arrays(given: Mapping[str, mx.array]) -> dict[str, mx.array]:
    for name, array in given.items():
        if name == "score_age":
            if not isinstance(array, mx.array) or array.ndim != 1:
                raise ValueError(f"score_age must be [n_kv_heads], got {getattr(array, 'shape', type(array).__name__)}")
            checks.finite_matrix(name, array[:, None], "[n_kv_heads]")
            if (array < 0).any().item():
                raise ValueError("score_age must not be negative: of rows that differ in age alone the newest is best")
        else:
            checks.finite_matrix(name, array, "[n_kv_heads, head_dim]")
    shapes = {name: tuple(array.shape) for name, array in given.items()}
    widths = [{shape for name, shape in shapes.items() if part in name} for part in ("key", "value")]
    if len({shape[0] for shape in shapes.values()}) > 1 or any(len(of_part) > 1 for of_part in widths):
        raise ValueError(
            "the arrays must have one row for each KV head of one layer, and the two of keys and the two of values one "
            f"shape each, got {shapes}"
        )
    if len(given) == len(LEARNED):
        flat = functools.reduce(mx.logical_and, [(given[name] == 0).all(axis=1) for name in OF_ROWS])
        if (flat & (given["score_age"] == 0)).any().item():
            raise ValueError("the arrays must not all be zero for a head: nothing would score its rows")
    return {name: array.astype(mx.float32) for name, array in given.items()}


def _score(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    return Scores(head_by_head(_row_scores, keys, values, positions, params), unseen=(), newest_first=True)


def _row_scores(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> mx.array:
    # Quotients, and no products, where something is added: a sum of products might be contracted into a fused
    # multiply-add, and the bits of a compiled step would differ from those of a block.
    f, e, g, c, gain = params
    of_keys, of_values = (
        ((linear[:, :, None] + rows / (1 / square)[:, :, None]) * rows).sum(-1)
        for rows, linear, square in ((widened(keys), f, e), (widened(values), g, c))
    )
    return of_keys + of_values + positions / (1 / gain)


def _metal_score(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    # One projection of [k, k^2, v, v^2] by the kernel of Q-Filters, whose order of summation is fixed.
    f, e, g, c, gain = params
    k, v = widened(keys), widened(values)
    rows = mx.concatenate([k, k * k, v, v * v], axis=-1)
    weights = mx.concatenate([f, e, g, c], axis=-1)
    sums = metal_projection(rows, rows, weights, mx.zeros((1,), mx.int32))
    return Scores(sums + positions / (1 / gain), unseen=(), newest_first=True)


_SCORES: Mapping[bool, RowScores] = {False: _score, True: _metal_score}

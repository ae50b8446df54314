"""Argument checks that say what was given, why it cannot work and what to do."""

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MOST_TOKENS = 2**31 - 1  # of one sequence: offsets are int32


def whole_number(name: str, value: object, least: int, most: int = MOST_TOKENS, example: int | None = None) -> int:
    """`value` as an int from `least` to `most`: whatever has a `__index__`, numpy's whole numbers included.

    ValueError otherwise; booleans and floats are refused. Go on with what this returns: it alone is plain JSON.
    """
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        example = max(least, 1) if example is None else example
        raise ValueError(f"{name} must be a whole number, got {value!r}; write for example {name}={example}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def whole_numbers(name: str, values: Any, least: int) -> list[int]:
    """Each of `values` as an int of at least `least`. ValueError otherwise, also for a text and for what is no list."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be a list of whole numbers, got {values!r}")
    return [whole_number(f"{name}[{i}]", value, least) for i, value in enumerate(values)]


def rows_of_budget(budget: object) -> int:
    """`budget` as an int of at least 1. ValueError otherwise."""
    return whole_number("budget", budget, 1, example=512)  # one that leaves room for sinks and recent rows


def above_zero(name: str, value: object) -> float:
    """`value` as a float above 0 and finite. ValueError otherwise; booleans are refused."""
    number = plain(value)
    if isinstance(number, bool | np.bool_) or not isinstance(number, int | float | np.floating):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {number}")
    return float(number)


def plain(value: Any) -> Any:
    """`value` as an int where it is a whole number of another type, such as numpy's; anything else as it is."""
    if isinstance(value, bool | np.bool_):  # older numpy's have a __index__ too
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def row_limits(
    budget: object, n_sink: object, recent: object = 0, recent_name: str | None = "recent"
) -> tuple[int, int, int]:
    """The three row counts of a budgeted cache, checked together.

    recent_name: what the method calls the last; None where it has no such rows.

    Raises ValueError when one is not a whole number in range, or when protected rows leave nothing to choose from.
    """
    budget = rows_of_budget(budget)
    n_sink = whole_number("n_sink", n_sink, 0)
    recent = whole_number(recent_name or "recent", recent, 0)
    if n_sink + recent >= budget:
        names = ["n_sink"] if recent_name is None else ["n_sink", recent_name]
        got = f"{n_sink}" if recent_name is None else f"{n_sink} + {recent}"
        raise ValueError(
            f"{' + '.join(names)} must be smaller than budget, got {got} >= {budget}: every row would be protected and "
            f"none could be evicted; raise budget, or lower {' or '.join(names)}"
        )
    return budget, n_sink, recent


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """ValueError unless `value` is among `allowed`."""
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def block_dimensions(keys: mx.array, values: mx.array) -> None:
    """ValueError unless keys and values have four dimensions each, and a float type of at most 32 bits."""
    if keys.ndim != 4 or values.ndim != 4:
        raise ValueError(
            f"keys must be [B,H,S,D] and values [B,H,S,D_v], got shapes {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if keys.dtype not in FLOATS or values.dtype not in FLOATS:
        raise ValueError(
            f"keys and values must be float32, float16 or bfloat16, got {keys.dtype} and {values.dtype}; cast them, or "
            "hand over the arrays before they are quantised"
        )


def block_shapes(keys: mx.array, values: mx.array, batch: int, n_kv_heads: int, head_dim: int, value_dim: int) -> None:
    """ValueError unless keys [B,H,S,D] and values [B,H,S,D_v] fit each other and the state they join."""
    block_dimensions(keys, values)
    (*places, key_dim), (*others, dim) = keys.shape, values.shape
    if places != others:
        raise ValueError(
            f"keys and values must agree in batch, heads and tokens, got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    given, heads, n_tokens = places
    if n_tokens == 0:
        raise ValueError("keys and values hold no token (S = 0); call update only with at least one token")
    if given != batch:
        raise ValueError(
            f"the batch size changed from {batch} to {given} between calls; start a fresh state, or merge, "
            "extend, filter or extract the cache"
        )
    if heads != n_kv_heads:
        raise ValueError(f"this state was made for {n_kv_heads} KV heads, got keys with {heads}")
    if (key_dim, dim) != (head_dim, value_dim):
        raise ValueError(
            f"this state was made for head_dim {head_dim} and value_dim {value_dim}, got {key_dim} and {dim}"
        )


def block_dtypes(keys: mx.array, values: mx.array, key_dtype: mx.Dtype, value_dtype: mx.Dtype) -> None:
    """ValueError unless a block has the types of the rows that it joins: the core casts nothing, its caller may."""
    if (keys.dtype, values.dtype) != (key_dtype, value_dtype):
        raise ValueError(
            f"this state holds {key_dtype} keys and {value_dtype} values, got {keys.dtype} and {values.dtype}: rows "
            "are kept bit for bit; cast the block, or start the state with init(..., dtype=) of the model's own type"
        )


def countable(n_seen: int, n_tokens: int) -> None:
    """ValueError when a sequence that has seen `n_seen` tokens cannot count so many more."""
    if n_seen + n_tokens > MOST_TOKENS:
        raise ValueError(
            f"a sequence counts at most 2**31 - 1 = {MOST_TOKENS} tokens; this one has seen {n_seen} and {n_tokens} "
            "are to come; start again from a shorter prompt"
        )


def real_tokens(valid: mx.array, batch: int) -> None:
    """ValueError unless `valid` is int32 [B], the real tokens of each sequence."""
    if not isinstance(valid, mx.array) or valid.shape != (batch,) or valid.dtype != mx.int32:
        given = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, mx.array) else type(valid).__name__
        raise ValueError(f"valid must be int32 [{batch}], how many tokens of each sequence are real, got {given}")


def block_queries(queries: mx.array, keys: mx.array) -> None:
    """ValueError unless queries [B,H_q,S,D] are those of the tokens of keys [B,H,S,D]."""
    batch, _, n_tokens, _ = keys.shape
    if queries.ndim != 4 or (queries.shape[0], queries.shape[2]) != (batch, n_tokens):
        raise ValueError(
            f"queries must be [{batch}, H_q, {n_tokens}, D], one per query head and token of the keys, got shape "
            f"{tuple(queries.shape)}"
        )


def fits_heads(name: str, array: mx.array, n_kv_heads: int, head_dim: int) -> None:
    """ValueError unless `array`, [H,D] or [H,D,D], was made for this many KV heads of this dimension."""
    n_dims = array.ndim - 1
    if array.shape != (n_kv_heads, *[head_dim] * n_dims):
        raise ValueError(
            f"{name} must be [n_kv_heads{', head_dim' * n_dims}] = {(n_kv_heads, *[head_dim] * n_dims)} for this "
            f"layer, got shape {tuple(array.shape)}; calibrate this model, or average query-head filters with "
            "average_gqa_filters"
        )


def finite_matrix(name: str, array: mx.array, shape: str) -> None:
    """ValueError unless `array` is 2-D and finite. Looks at its values: for construction time only."""
    if not isinstance(array, mx.array):
        raise ValueError(f"{name} must be an mx.array {shape}, got {type(array).__name__}; wrap it in mx.array(...)")
    if array.ndim != 2:
        raise ValueError(f"{name} must be 2-D, {shape}, got shape {tuple(array.shape)}")
    if not mx.isfinite(array).all().item():
        raise ValueError(f"{name} holds NaN or inf; a non-finite filter would rank every row alike, calibrate again")


def not_zero(name: str, array: mx.array, axis: int | None = None) -> None:
    """ValueError when `array` is all zeros, or is so along `axis`. Looks at its values: for construction time only."""
    if not (array != 0).any(axis=axis).all().item():
        raise ValueError(
            f"{name} holds nothing but zeros{'' if axis is None else ' for one head or more'}: every row would score "
            "alike, and the oldest would stay; calibrate again"
        )

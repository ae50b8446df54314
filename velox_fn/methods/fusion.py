"""Fusion: score rows by several static scores together, each in units of its own spread.

This project's own; no paper. A row scores

    s_i = sum over terms t of  w_t (s_t,i - m_t) / d_t        (combine="sum"; "max": the largest of them)

where s_t is the score of a static method (`scorers.SCORERS`), and m_t and d_t its mean and standard deviation over the
rows of calibration text, per KV head. The default terms are the projection of Q-Filters, the difference of KeyDiff, and
the size of the value, which no score of keys can see. docs/fusion.md has the derivation and the measurements.

Each term is computed once, from the row alone. So fusion is static: the kept set is the same however tokens are split
into calls.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.fused_evict import resolve_metal
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.landing import STEPS_KEPT
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.scorers import METAL_SUMS, MLX_SUMS, SCORERS, head_by_head
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, Score, static_eviction
from velox_fn.engine.widening import widened

TERMS = "projection+key_difference+value_norm"
COMBINE = "sum"
PER_TERM = ("weights", "means", "deviations")
"""The arguments [H,T] that have a column for each term."""

_OFF = MappingProxyType({"max": -3e38, "sum": 0.0})
"""What a term that is left out counts. Finite: a row that no term scores still beats one that is not finite."""


def fusion(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    terms: str | tuple[str, ...] = TERMS,
    combine: str = COMBINE,
    filters: mx.array | None = None,
    mean_keys: mx.array | None = None,
    weights: mx.array | None = None,
    means: mx.array | None = None,
    deviations: mx.array | None = None,
    rollback: int = 0,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction:
    """The fusion of static scores, each in units of its own spread. `install` brings the arrays from a calibration.

    Source: this project's own, no paper (docs/fusion.md).

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        terms: names of `scorers.SCORERS`, joined by +, or as a tuple.
        combine: "sum" or "max".
        filters: float32 [H,D], for the term "projection".
        mean_keys: float32 [H,D], for the term "key_difference".
        weights: float32 [H,T], a column for each term in order. Ones by default. 0 leaves a term out for that head.
        means: float32 [H,T], of each term over calibration text.
        deviations: float32 [H,T], likewise. 0 leaves a term out for that head.
        rollback: tokens that can be taken back after evictions.
        use_metal_kernels: True or False; None uses them where they run.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        A static `Eviction`. Without the arrays that its terms need, its `init` raises ValueError.

    Raises:
        ValueError: a count cannot work; terms or combination are unknown; an array is not finite, does not fit the
            others, is taken by no term, or would score every row alike.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import fusion
        >>> ones = mx.ones((2, 1))
        >>> fusion(budget=256, terms="value_norm", means=ones, deviations=ones).static
        True
    """
    names = term_names(terms)
    checks.one_of("combine", combine, ("max", "sum"))
    given = {
        "filters": filters,
        "mean_keys": mean_keys,
        "means": means,
        "deviations": deviations,
        "weights": weights,
    }
    params = _checked_arrays(names, {name: array for name, array in given.items() if array is not None})
    wanted = arrays_taken(names)
    missing = [name for name in wanted if name not in params]
    metal = resolve_metal(use_metal_kernels)
    plain = static_eviction(
        "fusion",
        _fused(names, combine, metal),
        budget=budget,
        n_sink=n_sink,
        recent=recent,
        rollback=rollback,
        # The eviction kernel's ties go to the lower position. Scores are still taken by the kernels.
        use_metal_kernels=False if _newest_first(names) else use_metal_kernels,
        params={} if missing else _score_params(names, params),
        settings={"terms": "+".join(names), "combine": combine},
    )
    if not missing:
        return at_intervals(pinning(dataclasses.replace(plain, params=params), pinned), interval)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"fusion of {' and '.join(names)} needs {', '.join(missing)}, which come from a calibration: run `velox "
            "calibrate`, and give what it makes as calibration= to install, or --calibration"
        )

    return dataclasses.replace(at_intervals(pinning(plain, pinned), interval), init=refuse, params=params)


def term_names(terms: str | Sequence[str]) -> tuple[str, ...]:
    """The terms one by one. Raises ValueError when there is none, or one is unknown or named twice."""
    names = tuple(terms.split("+")) if isinstance(terms, str) else tuple(terms if isinstance(terms, Sequence) else ())
    if not names or len(set(names)) < len(names) or any(name not in SCORERS for name in names):
        raise ValueError(
            f"terms must be different names among {', '.join(SCORERS)}, joined by +, such as {TERMS}; got {terms!r}"
        )
    return names


def arrays_taken(names: Sequence[str]) -> tuple[str, ...]:
    """The calibrated arguments that a fusion of these terms cannot do without."""
    return (*dict.fromkeys(name for term in names for name in SCORERS[term].takes), "means", "deviations")


def _checked_arrays(names: Sequence[str], given: Mapping[str, mx.array]) -> dict[str, mx.array]:
    n_heads = {}
    for name, array in given.items():
        per_term = name in PER_TERM
        checks.finite_matrix(name, array, "[n_kv_heads, terms]" if per_term else "[n_kv_heads, head_dim]")
        if name == "filters":
            checks.not_zero(name, array, axis=1)
        if name in ("deviations", "mean_keys"):  # one head of zeros has the same row for every token
            checks.not_zero(name, array)
        if name not in (*arrays_taken(names), "weights"):
            raise ValueError(f"{name} is taken by none of the terms {', '.join(names)}; leave it out")
        if per_term and array.shape[1] != len(names):
            raise ValueError(
                f"{name} must be [n_kv_heads, terms], with a column for each of {', '.join(names)}, got shape "
                f"{tuple(array.shape)}"
            )
        if name in ("weights", "deviations") and (array < 0).any().item():
            raise ValueError(f"{name} must not be negative; 0 leaves a term out")
        if name == "weights" and (array == 0).all(axis=1).any().item():
            raise ValueError("weights must not leave every term of a head out: nothing would score its rows")
        n_heads[name] = array.shape[0]
    if len(set(n_heads.values())) > 1:
        raise ValueError(f"the arrays must have one row for each KV head of one layer, got {n_heads}")
    return {name: array.astype(mx.float32) for name, array in given.items()}


def _score_params(names: Sequence[str], params: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """What the score function reads: the terms' directions [H,D], then of each term its centre and its spread [H]."""
    directions = {name: params[name] for name in arrays_taken(names) if name not in PER_TERM}  # in the terms' order
    moments: dict[str, mx.array] = {}
    for t, name in enumerate(names):
        spread = params["deviations"][:, t]
        if "weights" in params:
            weight = params["weights"][:, t]
            spread = mx.where(weight > 0, spread / mx.where(weight > 0, weight, 1.0), 0.0)
        moments |= {f"centre of {name}": params["means"][:, t], f"spread of {name}": spread}
    return directions | moments


@functools.lru_cache(STEPS_KEPT)
def _fused(names: tuple[str, ...], combine: str, metal: bool) -> Score:
    # One function object for each form, since compiled steps are kept by their score function.
    sums = METAL_SUMS if metal else MLX_SUMS
    directions = list(dict.fromkeys(name for term in names for name in SCORERS[term].takes))
    newest_first = _newest_first(names)
    seen_by = {part: [t for t, name in enumerate(names) if part in SCORERS[name].reads] for part in ("keys", "values")}

    def fused_scores(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> mx.array:
        exact = widened(keys)  # once for all terms
        scores = []
        for name in names:
            own = tuple(params[directions.index(taken)] for taken in SCORERS[name].takes)
            scores.append(SCORERS[name].score(exact, values, positions, own, sums))
        moments = params[len(directions) :]
        fused = _combined(combine, [_in_units(*term) for term in zip(scores, moments[::2], moments[1::2], strict=True)])
        for t in {terms[0] for terms in seen_by.values() if terms}:
            fused = (
                fused + 0 * scores[t]
            )  # adds 0, or NaN where the row is not finite, also where this term is left out
        return fused

    def _in_units(scores: mx.array, centre: mx.array, spread: mx.array) -> mx.array:
        # A quotient, and no product: a sum of products might be contracted into a fused multiply-add, and the bits of a
        # compiled step would differ from those of a block.
        on = spread > 0
        return mx.where(on, (scores - centre) / mx.where(on, spread, 1.0), _OFF[combine])

    def score(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
        unseen = tuple(rows for part, rows in (("keys", keys), ("values", values)) if not seen_by[part])
        if metal:
            fused = fused_scores(keys, values, positions, params)
        else:
            fused = head_by_head(fused_scores, keys, values, positions, params)
        return Scores(fused, unseen, newest_first)

    return score


def _newest_first(names: Sequence[str]) -> bool:
    return any(SCORERS[name].newest_first for name in names)


def _combined(combine: str, units: Sequence[mx.array]) -> mx.array:
    return functools.reduce(mx.maximum if combine == "max" else mx.add, units)

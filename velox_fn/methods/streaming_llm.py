"""StreamingLLM: keep the first tokens and the last ones.

`n_sink` leading tokens and the most recent `budget - n_sink` stay. All rows score alike, and among equals the newest is
best.

Source: "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453), section 3.2.

Differs from the paper:

- A block attends to all kept rows before any leaves.
- Positions stay true. With `renumber=True` attention sees the rows as the paper places them, without a gap between
  sinks and window.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.renumber import gap_free, gap_free_view, renumbering
from velox_fn.engine.rope import RopeSpec
from velox_fn.engine.rows import View
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, StaticState, static_eviction


def streaming_llm(
    *,
    budget: int = 512,
    n_sink: int = 4,
    renumber: bool = False,
    rope: RopeSpec | Mapping[str, Any] | None = None,
    rollback: int = 0,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[StaticState]:
    """The StreamingLLM method: keep the first tokens and the last ones.

    Source: arXiv:2309.17453, section 3.2. Common arguments: see `METHODS`.

    Args:
        budget: rows kept, sinks included.
        n_sink: leading tokens that always stay.
        renumber: show attention the n kept rows at positions offset - n ... offset - 1. Needs `rope`.
        rope: the model's rotary embedding. `install` reads it.
        rollback: tokens that can be taken back after evictions.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        A static `Eviction`.

    Raises:
        ValueError: a count cannot work, or `rope` is missing.

    Example:
        >>> from velox_fn import streaming_llm
        >>> streaming_llm(budget=256).static
        True
    """
    spec = renumbering(renumber, rope)
    plain = static_eviction(
        "streaming_llm",
        _recency,
        budget=budget,
        n_sink=n_sink,
        rollback=rollback,
        use_metal_kernels=False,  # their ties go to the lower position
    )

    def update(
        state: StaticState,
        keys: mx.array,
        values: mx.array,
        *,
        queries: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[StaticState, View]:
        if valid is not None:  # a padded update needs the ranks of every row
            state = plain.scored(state)
        after, view = plain.update(state, keys, values, valid=valid)
        if spec is not None:
            view = gap_free_view(state.store, after.store, view, keys.shape[2], valid, spec)
        return after, view

    settings = {**plain.settings, "renumber": renumber, "rope": None if spec is None else spec.plain()}
    shown = None if spec is None else functools.partial(gap_free, rope=spec)
    method = dataclasses.replace(plain, update=update, settings=settings, shown=shown)
    return at_intervals(pinning(method, pinned), interval)


def _recency(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    return Scores(mx.zeros(keys.shape[:3], mx.float32), unseen=(keys, values), newest_first=True)

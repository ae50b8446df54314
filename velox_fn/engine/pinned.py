"""Positions that never leave, beside the sinks: a system prompt, a list of tools.

They are half-open ranges of positions, and stay as sinks do: a row in one takes part in the selection with a score of
+inf from its arrival on. A method has ranges that hold for every sequence; a sequence may have more of its own, which
travel with it through batches.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.records import replaced
from velox_fn.engine.store import Ranges, Store

Pinned = Iterable[Sequence[int]]
"""Half-open position ranges as a caller writes them: [(0, 120), (300, 310)]."""


def pinned_ranges(pinned: Pinned) -> Ranges:
    """`pinned` in order, with ranges that touch made one. Raises ValueError unless each is 0 <= start < stop."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(_range(one) for one in _listed(pinned)):
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return tuple(found)


def pinning(method: Eviction, pinned: Pinned) -> Eviction:
    """`method`, with rows at the positions in `pinned` that never leave.

    Raises ValueError when a range is none, or when protected rows would fill the budget.
    """
    ranges = pinned_ranges(pinned)
    settings = {**method.settings, "pinned": [list(one) for one in ranges]}
    if not ranges:
        return dataclasses.replace(method, settings=settings)
    check_room(method, ranges)

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> Any:
        return pinned_state(method.init(batch, n_kv_heads, head_dim, value_dim, dtype), ranges)

    return dataclasses.replace(method, init=init, settings=settings)


def pinned_state(state: Any, pinned: Pinned) -> Any:
    """An empty state whose sequences keep the positions in `pinned` too. ValueError when they would fill the budget."""
    return pinned_by_sequence(state, [pinned_ranges(pinned)] * state.store.offset.shape[0])


def pinned_by_sequence(state: Any, pinned: Sequence[Ranges]) -> Any:
    """`pinned_state` with ranges for each sequence."""
    if not any(pinned):
        return state
    store: Store = state.store
    held = store.pinned or ((),) * store.offset.shape[0]
    together = tuple(pinned_ranges((*own, *more)) for own, more in zip(held, pinned, strict=True))
    for one in together:
        _check_fits(one, store.budget, store.n_sink, store.recent)
    return replaced(state, store=replaced(store, pinned=together))


def check_room(method: Eviction, ranges: Ranges) -> None:
    """ValueError when these ranges, with what the settings of `method` protect, would fill the budget.

    As far as its settings tell: a state is asked again when it begins.
    """
    counts = {name: method.settings.get(name, 0) for name in ("budget", "n_sink", *_WINDOWS)}
    if "budget" in method.settings:
        together = pinned_ranges((*method.settings.get("pinned", ()), *ranges))
        _check_fits(together, counts["budget"], counts["n_sink"], max(counts[name] for name in _WINDOWS))


_WINDOWS = ("recent", "grace", "obs_window")  # what methods call the latest rows that stay


def _check_fits(ranges: Ranges, budget: int, n_sink: int, recent: int) -> None:
    n_pinned = sum(max(stop - max(start, n_sink), 0) for start, stop in ranges)
    if n_sink + recent + n_pinned >= budget:
        raise ValueError(
            f"pinned={[list(one) for one in ranges]} holds {n_pinned} positions beside {n_sink} sinks and {recent} "
            f"recent rows, which fills the budget of {budget}: none of the other rows could stay; raise budget by at "
            f"least {n_sink + recent + n_pinned + 1 - budget}, or pin or protect fewer"
        )


def _listed(pinned: Pinned) -> list[Any]:
    if isinstance(pinned, str) or not isinstance(pinned, Iterable):
        raise ValueError(f"pinned is a list of position ranges, such as [(0, 120)], got {pinned!r}")
    return list(pinned)


def _range(one: Any) -> tuple[int, int]:
    if isinstance(one, str) or not isinstance(one, Sequence) or len(one) != 2:
        raise ValueError(
            f"pinned holds ranges of positions, each a pair of its first position and the one after its last, got "
            f"{one!r}; write for example pinned=[(0, 120)]"
        )
    start = checks.whole_number("the start of a pinned range", one[0], 0)
    return start, checks.whole_number(f"the stop of a pinned range that starts at {start}", one[1], start + 1)

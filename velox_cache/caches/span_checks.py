"""What must hold of a packed cache whose rows leave at intervals."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from velox_fn.engine.records import arrays
from velox_fn.engine.select import rank_positions
from velox_fn.engine.slots import span_of
from velox_fn.engine.store import Store


def with_places(empty: Any, leaves: Sequence[mx.array], n_begun: int) -> Any:
    """`empty` with room for the queries that a packed record holds beyond the `n_begun` arrays it begins with."""
    span, more = empty.store.span, len(leaves) - n_begun
    if span is None or more not in (1, 2):
        return empty
    batch = empty.store.ranks.shape[0]
    first = len(arrays((empty.store.keys, empty.store.values))) + 2  # after ranks and offset
    shapes = [(batch, *leaf.shape[1:]) for leaf in leaves[first : first + more]]
    places = tuple(
        mx.zeros(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves[first : first + more], strict=True)
    )
    return dataclasses.replace(
        empty, store=dataclasses.replace(empty.store, span=dataclasses.replace(span, queries=places))
    )


def spans_alike(rows: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether a header's span has the fields and the interval of the method's own."""
    one, other = rows["span"], here["span"]
    if other is None or one is None:
        return one is other
    counts = ("kept", "since", "seen")
    return (
        isinstance(one, dict)
        and {*one, "queries", "ranks"} == {*other, "queries", "ranks"}
        and all(one.get(name, []) == [] for name in ("queries", "ranks"))  # what they hold is among the arrays
        and one["interval"] == other["interval"]
        and isinstance(one["ragged"], bool)
        and isinstance(one["settled"], int)
        and (one["scale"] is None or isinstance(one["scale"], float))
        and all(isinstance(one[name], list) and all(type(n) is int and n >= 0 for n in one[name]) for name in counts)
    )


def span_contradiction(store: Store, seen: Sequence[int]) -> str | None:
    """What the counts of a span and the rows say differently, if anything."""
    span = span_of(store)
    counted = f"its header has {span.settled} settled columns, kept={span.kept}, since={span.since}, seen={span.seen}"
    if tuple(seen) != span.seen or not len(span.kept) == len(span.since) == len(seen):
        return f"{counted}, its arrays {list(seen)}"
    alike = len(set(span.since)) == 1 and set(span.kept) == {span.settled}
    used = span.interval if span.ragged else span.since[0]
    fits = store.filled == span.settled + used <= store.capacity and (span.ragged or alike)
    at_boundaries = all(boundary >= 0 and boundary % span.interval == 0 for boundary in span.boundaries)
    if not fits or not at_boundaries or max(span.since) > span.interval or max(span.kept) > span.settled:
        return f"{counted} for filled={store.filled} of {store.capacity}"
    positions = np.array(rank_positions(store.ranks))
    for b, (kept, boundary) in enumerate(zip(span.kept, span.boundaries, strict=True)):
        real, padding = np.split(positions[b], [kept], axis=-1)
        apart = (np.diff(real, axis=-1) > 0).all() and (real >= 0).all() and (real < boundary).all()
        if kept < min(boundary, store.budget) or not apart or not (padding == -1).all():
            return f"{counted}; of the rows kept of {boundary} tokens some are missing, stand twice or not in order"
    return None

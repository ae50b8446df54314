"""Frozen records and the one boundary where their arrays are listed.

`mx.eval`, `mx.compile` and file formats know arrays, not records, so everything that evaluates, compiles or saves a
record goes through `arrays` and `with_arrays`. chex is imported here and nowhere else: it brings jax with it, which is
most of our import time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import chex
import mlx.core as mx

_Record = TypeVar("_Record")


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
def record(cls: type[_Record]) -> type[_Record]:
    """Make `cls` a frozen, keyword-only record.

    Fields of type `mx.array`, and records inside it, hold what changes with the data; every other field (ints, strings,
    tuples of them, None) is static.
    """
    make: Callable[[type[_Record]], type[_Record]] = chex.dataclass(
        frozen=True, eq=False, kw_only=True, mappable_dataclass=False
    )
    return make(cls)


def arrays(state: Any) -> list[mx.array]:
    """The array leaves of a record in field order, nested records included."""
    found: list[mx.array] = []
    for field in dataclasses.fields(state):
        leaf = getattr(state, field.name)
        if isinstance(leaf, mx.array):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            found.extend(arrays(leaf))
    return found


def with_arrays(state: _Record, leaves: Sequence[mx.array]) -> _Record:
    """`state` with its array leaves replaced, in the order of `arrays(state)`; static fields stay.

    Raises ValueError when the number of leaves differs.
    """
    remaining = list(leaves)
    rebuilt = _rebuild(state, remaining)
    if remaining:
        raise ValueError(f"{type(state).__name__} has {len(arrays(state))} arrays; {len(leaves)} were given")
    return rebuilt


def _rebuild(state: _Record, remaining: list[mx.array]) -> _Record:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(state):  # type: ignore[arg-type]
        leaf = getattr(state, field.name)
        if isinstance(leaf, mx.array):
            if not remaining:
                raise ValueError(f"{type(state).__name__} needs {len(arrays(state))} arrays; fewer were given")
            changes[field.name] = remaining.pop(0)
        elif dataclasses.is_dataclass(leaf):
            changes[field.name] = _rebuild(leaf, remaining)
    return dataclasses.replace(state, **changes)  # type: ignore[type-var]

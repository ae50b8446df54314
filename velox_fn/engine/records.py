"""Frozen records and the one boundary where their arrays are listed.

`mx.eval`, `mx.compile` and file formats know arrays, not records, so everything that evaluates, compiles or saves a
record goes through `arrays` and `with_arrays`. chex is imported here and nowhere else: it brings jax with it, which is
most of our import time.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform

import chex
import mlx.core as mx

_Record = TypeVar("_Record")


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
def record(cls: type[_Record]) -> type[_Record]:
    """Make `cls` a frozen, keyword-only record.

    Fields of type `mx.array`, and records inside it, hold what changes with the data. Every other field (ints, strings,
    tuples of them, None) is static.
    """
    make: Callable[[type[_Record]], type[_Record]] = chex.dataclass(
        frozen=True, eq=False, kw_only=True, mappable_dataclass=False
    )
    return make(cls)


def arrays(state: Any) -> list[mx.array]:
    """The arrays of a record in field order, those of nested records and tuples included."""
    if isinstance(state, mx.array):
        return [state]
    return [leaf for part in _parts(state).values() for leaf in arrays(part)]


def with_arrays(state: _Record, leaves: Sequence[mx.array]) -> _Record:
    """`state` with its arrays replaced; static fields stay.

    Args:
        state: a record.
        leaves: arrays in the order of `arrays(state)`.

    Raises:
        ValueError: the number of arrays differs.
    """
    expected = len(arrays(state))
    if len(leaves) != expected:
        raise ValueError(f"{type(state).__name__} has {expected} arrays; {len(leaves)} were given")
    rebuilt: _Record = _rebuilt(state, iter(leaves))
    return rebuilt


def statics(state: Any) -> dict[str, Any]:
    """The static fields of a record, by name; those of nested records as a mapping of their own."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        part = getattr(state, field.name)
        if dataclasses.is_dataclass(part):
            found[field.name] = statics(part)
        elif not arrays(part):
            found[field.name] = part
    return found


def with_statics(state: _Record, fields: Mapping[str, Any]) -> _Record:
    """`state` with its static fields replaced by `fields`, in the form of `statics(state)`, also after JSON."""
    return replaced(state, **{name: _static(getattr(state, name), value) for name, value in fields.items()})


def _static(part: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_statics(part, value)
    return tuple(value) if isinstance(value, list) else value  # JSON has no tuples


def replaced(state: _Record, **changes: Any) -> _Record:
    """`dataclasses.replace` for records, several times faster: it runs a few times per layer and token."""
    changed = object.__new__(type(state))
    vars(changed).update(vars(state), **changes)
    return changed


def _parts(state: Any) -> dict[Any, Any]:
    if isinstance(state, tuple):
        return dict(enumerate(state))
    if dataclasses.is_dataclass(state):
        return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {}


def _rebuilt(state: Any, leaves: Iterator[mx.array]) -> Any:
    if isinstance(state, mx.array):
        return next(leaves)
    parts = {name: _rebuilt(part, leaves) for name, part in _parts(state).items()}
    if isinstance(state, tuple):
        return tuple(parts.values())
    return dataclasses.replace(state, **parts) if parts else state

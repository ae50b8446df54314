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

from velox_fn.engine.constants import Constants

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
    return [leaf for part in parts(state).values() for leaf in arrays(part)]


def with_arrays(state: _Record, leaves: Sequence[mx.array]) -> _Record:
    """`state` with its arrays replaced; static fields stay.

    Static fields go with their arrays: arrays of a later state, which has more rows in use, do not belong to this one.
    Where the room for rows has grown between them, the shapes tell. A loop that compiles its step takes
    `velox_fn.compiled`, which keeps both together.

    Args:
        state: a record.
        leaves: arrays in the order of `arrays(state)`.

    Raises:
        ValueError: the number of arrays differs, or the shape or dtype of one.
    """
    changed = refilled(state, leaves)
    for place, (held, given) in enumerate(zip(arrays(state), leaves, strict=True)):
        if (held.shape, held.dtype) != (given.shape, given.dtype):
            raise ValueError(
                f"array {place} of {type(state).__name__} is {held.dtype} {tuple(held.shape)}; {given.dtype} "
                f"{tuple(given.shape)} was given. Arrays of another state do not fit the static fields of this one, "
                "such as its rows in use: carry the whole state, or compile the step with velox_fn.compiled"
            )
    return changed


def refilled(state: _Record, leaves: Sequence[mx.array]) -> _Record:
    """`with_arrays` for arrays of any shape. The caller brings the static fields into line."""
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
            found[field.name] = part.digest if isinstance(part, Constants) else part
    return found


def with_statics(state: _Record, fields: Mapping[str, Any]) -> _Record:
    """`state` with its static fields replaced by `fields`, in the form of `statics(state)`, also after JSON.

    Constants stay.
    """
    return replaced(state, **{name: _static(getattr(state, name), value) for name, value in fields.items()})


def _static(part: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_statics(part, value)
    if isinstance(part, Constants):
        return part
    return tuple(_static(None, one) for one in value) if isinstance(value, list) else value  # JSON has no tuples


def replaced(state: _Record, **changes: Any) -> _Record:
    """`dataclasses.replace` for records, several times faster: it runs a few times per layer and token."""
    changed = object.__new__(type(state))
    changed.__dict__.update(state.__dict__, **changes)
    return changed


def parts(state: Any) -> dict[Any, Any]:
    """The fields of a record by name, or of a tuple by place; nothing for anything else."""
    if isinstance(state, tuple):
        return dict(enumerate(state))
    if dataclasses.is_dataclass(state):
        return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {}


def _rebuilt(state: Any, leaves: Iterator[mx.array]) -> Any:
    if isinstance(state, mx.array):
        return next(leaves)
    fields = {name: _rebuilt(part, leaves) for name, part in parts(state).items()}
    if isinstance(state, tuple):
        return tuple(fields.values())
    return dataclasses.replace(state, **fields) if fields else state

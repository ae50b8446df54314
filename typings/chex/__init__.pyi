"""The part of chex that velox_fn/engine/records.py uses; chex ships no type information."""

from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")

@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
def dataclass(
    *,
    init: bool = ...,
    repr: bool = ...,
    eq: bool = ...,
    order: bool = ...,
    unsafe_hash: bool = ...,
    frozen: bool = ...,
    kw_only: bool = ...,
    mappable_dataclass: bool = ...,
) -> Callable[[type[_T]], type[_T]]: ...
def __getattr__(name: str) -> Any: ...

"""Tables by name that say what they hold."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

_Value = TypeVar("_Value")


class Named(Mapping[str, _Value]):
    """An immutable mapping by name, with a docstring of its own for `help`."""

    def __init__(self, entries: Mapping[str, _Value], doc: str) -> None:
        self._entries = MappingProxyType(dict(entries))
        self.__doc__ = doc

    def __getitem__(self, name: str) -> _Value:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(dict(self._entries))

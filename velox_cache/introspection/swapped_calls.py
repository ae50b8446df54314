"""Modules that answer calls in another way for a while. Python looks calls up in the class, so the class is swapped."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

Call = Callable[..., Any]


def swap_call(module: nn.Module, purpose: str, made: Callable[[Call], Call]) -> None:
    """Have `module` answer with `made(the call it had)`, a function of itself and the arguments.

    purpose: names the swap, a word. Swapping twice for one purpose is swapping once.
    """
    given = type(module)
    if not is_swapped(module, purpose):
        names = {"__module__": given.__module__, "__qualname__": given.__qualname__, "__doc__": given.__doc__}
        call = made(given.__call__)
        module.__class__ = type(given.__name__, (given,), {**names, "__call__": call, f"swapped_{purpose}": True})


def swap_back(module: nn.Module, purpose: str) -> None:
    """Undo `swap_call`, the last one that is not undone. Does nothing when there was none for this purpose."""
    if is_swapped(module, purpose):
        module.__class__ = type(module).__bases__[0]


def is_swapped(module: nn.Module, purpose: str) -> bool:
    """Whether calls of `module` are swapped for this purpose."""
    return hasattr(type(module), f"swapped_{purpose}")

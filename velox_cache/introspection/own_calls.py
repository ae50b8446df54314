"""A module of a model called in another way, for a while."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn


def is_called_by(module: nn.Module, name: str) -> bool:
    """Whether `call_by` gave the module another call under this name."""
    return hasattr(type(module), name)


def call_by(module: nn.Module, name: str, make_call: Callable[[type[nn.Module]], Callable[..., Any]]) -> None:
    """Have calls of `module` go to what `make_call` makes for its class, unless they do already.

    The module gets a class of its own, under the same name: Python looks calls up in the class alone. `name` is that
    of an attribute of this class, the call that was given.
    """
    if is_called_by(module, name):
        return
    given = type(module)
    names = {"__module__": given.__module__, "__qualname__": given.__qualname__, "__doc__": given.__doc__}
    module.__class__ = type(given.__name__, (given,), {**names, "__call__": make_call(given), name: given.__call__})


def call_as_given(module: nn.Module, name: str) -> None:
    """Undo `call_by`. Does nothing when it was not called."""
    if is_called_by(module, name):
        module.__class__ = type(module).__bases__[0]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that are modules: in a pipeline other ranks' are none."""
    return [layer for layer in getattr(model, "layers", ()) if isinstance(layer, nn.Module)]

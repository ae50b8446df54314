"""List the eviction methods and their settings, with defaults.

A setting is given as --budget, --recent, --n-sink or --set NAME=VALUE on the command line, and as a keyword to
`velox_cache.install`. Both make `recent` three quarters of the budget unless told otherwise.
"""

import argparse
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import NoneType
from typing import Any, get_args, get_type_hints

EXAMPLES = """examples:
  velox methods
  velox methods qfilters"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox methods`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show all that the documentation says of one method")


def run(arguments: argparse.Namespace) -> int:
    """Print the registry."""
    from velox_fn.registry import ALIASES, METHODS, method_factory

    if arguments.name is not None:
        factory = method_factory(arguments.name)
        print(f"{_documentation(factory)}\n\nsettings: {settings_line(factory)}")
        return 0
    for name, factory in METHODS.items():
        also = [alias for alias, meant in ALIASES.items() if meant == name]
        print(f"{name} (also {', '.join(also)})" if also else name)
        for line in (_documentation(factory).split("\n", 1)[0], f"settings: {settings_line(factory)}"):
            print(textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    "))
    return 0


def settings_line(factory: Callable[..., object]) -> str:
    """Name and default of each setting: the arguments that are plain values. Arrays come from a calibration."""
    hints = get_type_hints(factory)
    shown = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if _is_plain(hints[parameter.name]) and parameter.name not in ("layer", "first_head")  # install fills them in
    ]
    return ", ".join(f"{parameter.name}={parameter.default}" for parameter in shown)


def _documentation(factory: Callable[..., object]) -> str:
    """What a method's module says, since each method has a module of its own."""
    return inspect.getdoc(sys.modules[factory.__module__]) or ""


def _is_plain(hint: Any) -> bool:
    options = get_args(hint) or (hint,)  # of a union or a Literal
    plain = (int, float, bool, str, NoneType, tuple[str, ...])
    return all(option in plain or isinstance(option, str) for option in options)

"""List the eviction methods and their settings, with defaults.

A setting is given as --budget, --recent, --n-sink or --set NAME=VALUE on the command line, and as a keyword to
`velox_cache.install`. Both make `recent` a quarter of the budget unless told otherwise.
"""

import argparse
import inspect
import sys
import textwrap

EXAMPLES = """examples:
  velox methods
  velox methods qfilters"""
ARRAYS = ("filters", "layer")  # arguments of factories that are not settings: they differ from layer to layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox methods`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show all that the documentation says of one method")


def run(arguments: argparse.Namespace) -> int:
    """Print the registry."""
    from velox_fn.registry import ALIASES, METHODS, method_factory

    if arguments.name is not None:
        factory = method_factory(arguments.name)
        print(inspect.getdoc(sys.modules[factory.__module__]))
        print(f"\nsettings: {settings_line(factory)}")
        return 0
    for name, factory in METHODS.items():
        also = [alias for alias, meant in ALIASES.items() if meant == name]
        print(f"{name}{' (also ' + ', '.join(also) + ')' if also else ''}")
        for line in (summary(factory), f"settings: {settings_line(factory)}"):
            print(textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    "))
    return 0


def summary(factory: object) -> str:
    """What a method does, in one line: the first of its module, since each method has a module of its own."""
    module = sys.modules[factory.__module__]
    return (inspect.getdoc(module) or "").split("\n", 1)[0]


def settings_line(factory: object) -> str:
    """Name and default of each setting of a method."""
    parameters = inspect.signature(factory).parameters.values()  # type: ignore[arg-type]
    shown = [parameter for parameter in parameters if parameter.name not in ARRAYS]
    return ", ".join(
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}"
        for parameter in shown
    )

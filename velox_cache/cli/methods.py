"""List the eviction methods and their settings, with defaults.

A setting is given as --budget, --recent, --n-sink or --set NAME=VALUE on the command line, and as a keyword to
`velox_cache.install`. Both give `recent` a share of the budget unless told otherwise: three quarters for most methods,
a half for learned, a quarter for keyformer. Where a method has its own name for the latest rows that stay, it is given
as `recent` too; its default is the method's.
"""

import argparse
import inspect
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from velox_fn.method import Method

EXAMPLES = """examples:
  velox methods
  velox methods qfilters"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox methods`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show all that the documentation says of one method")


def run(arguments: argparse.Namespace) -> int:
    """Print the registry."""
    from velox_cache.known_methods import known_methods, method_named
    from velox_fn.registry import ALIASES

    if arguments.name is not None:
        method = method_named(arguments.name)
        print(f"{_documentation(method)}\n\nsettings: {settings_line(method)}")
        return 0
    for name, method in known_methods().items():
        also = [alias for alias, meant in ALIASES.items() if meant == name]
        print(f"{name} (also {', '.join(also)})" if also else name)
        for line in (_documentation(method).split("\n", 1)[0], f"settings: {settings_line(method)}"):
            print(textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    "))
    return 0


def settings_line(method: "Method") -> str:
    """Name and default of each setting but the rotary embedding, which install reads from the model."""
    return ", ".join(
        f"{name}={default}{' (also: recent)' if name == method.window else ''}"
        for name, default in method.settings.items()
        if name != "rope"
    )


def _documentation(method: "Method") -> str:
    """The docstring of a built-in method's module, and of the factory of any other method."""
    from velox_fn.registry import BUILT_IN

    module = inspect.getmodule(method.factory)
    of_module = inspect.getdoc(module) if module is not None else None
    own = inspect.getdoc(method.factory)
    texts = (of_module, own) if method.name in BUILT_IN else (own, of_module)
    return next(filter(None, texts), "(not documented)")

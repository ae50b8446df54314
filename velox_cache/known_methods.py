"""The methods that the shell knows: those of `velox_fn.registry`, and those that installed packages bring.

A package brings one by an entry point of the group `velox_kv.methods`: its name is the method's, and its object a
factory, or a `velox_fn.Method` where the shell must know more of it. It is loaded when it is asked for.
"""

import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

from velox_fn import registry
from velox_fn.engine.eviction import Eviction
from velox_fn.method import Method

GROUP = "velox_kv.methods"


def method_named(name: str) -> Method:
    """The method of this name or alias. Raises ValueError that lists the known ones, or says why it cannot load."""
    if registry.find_method(name) is None:
        for entry in entry_points(group=GROUP):
            if entry.name == name:
                _register(entry)
    if registry.find_method(name) is None:
        known_methods()  # so that the message lists what is installed too
    return registry.method_named(name)


def known_methods() -> Mapping[str, Method]:
    """Every method by name. Warns of an installed one that cannot be loaded."""
    for entry in entry_points(group=GROUP):
        if registry.find_method(entry.name) is None:
            try:
                _register(entry)
            except ValueError as error:
                warnings.warn(str(error), stacklevel=2)
    return registry.all_methods()


def as_method(given: str | Method | Callable[..., Eviction]) -> Method:
    """The method that a name, an entry of the registry or a factory stands for.

    A factory that is not registered is taken as it is, without facts. Raises ValueError when it is none of these.
    """
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        return method_named(given)
    known = [method for method in registry.all_methods().values() if method.factory is given]
    return known[0] if known else Method(name=None, factory=given)


def _register(entry: EntryPoint) -> None:
    try:
        given = entry.load()
        facts = {} if not isinstance(given, Method) else {name: getattr(given, name) for name in _FACTS}
        registry.register(entry.name, given.factory if isinstance(given, Method) else given, **facts)
    except Exception as error:
        raise ValueError(f"the method {entry.name!r} of {entry.value!r} cannot be loaded: {error}") from error


_FACTS = tuple(name for name in Method.__dataclass_fields__ if name not in ("name", "factory"))

"""A small random model of any architecture that mlx_lm has."""

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, get_origin, get_type_hints

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_map

from velox_cache.architectures.sizes import PARTICULARS, SIZES

_PROBED = "hf_olmo"  # olmo.py leaves the process when this cannot be imported, and makes no other use of it


@cache
def architectures() -> tuple[str, ...]:
    """The modules of the installed `mlx_lm.models` that have a Model and its ModelArgs, by name."""
    names = (found.name for found in pkgutil.iter_modules(mlx_lm.models.__path__))
    return tuple(name for name in names if {"Model", "ModelArgs"} <= vars(_module(name)).keys())


def tiny_model(architecture: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A model of a few narrow layers with random float32 weights.

    changes: arguments of its ModelArgs, in place of those in `sizes`; for a model that wraps another, the other's.
    """
    module: Any = _module(architecture)
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(arguments(architecture, **changes)))
    model.update(tree_map(_told_apart, model.parameters()))
    mx.eval(model.parameters())
    return model.eval()


def arguments(architecture: str, **changes: Any) -> dict[str, Any]:
    """The configuration that `tiny_model` gives to the architecture's `ModelArgs.from_dict`."""
    args: Any = _module(architecture).ModelArgs
    particulars = dict(PARTICULARS.get(architecture, {}))
    wrapped = particulars.pop("wraps", None)
    if any(field.name == "text_config" for field in dataclasses.fields(args)):
        own = {"model_type": architecture, **SIZES, **particulars.get("text_config", {}), **changes}
        particulars["text_config"] = own if wrapped is None else arguments(wrapped, **changes)
        changes = {}
    filled = {"model_type": architecture, **SIZES, **particulars, **changes}
    return _by_type(args, filled) | filled


def _told_apart(parameter: mx.array) -> mx.array:
    """Norms, biases and attention sinks start out constant, where a term that is left out would not show."""
    if parameter.dtype not in (mx.float32, mx.float16) or not mx.all(parameter == parameter.flatten()[0]):
        return parameter
    return parameter + 0.3 * mx.random.normal(parameter.shape).astype(parameter.dtype)


def _by_type(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the fields that have no default and that nobody gave: the emptiest of their type."""
    missing = [
        field
        for field in dataclasses.fields(args)
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING
    ]
    empty: dict[Any, Any] = {int: 2, float: 1.0, bool: False, str: "", list: [], dict: {}}
    types = get_type_hints(args) if missing else {}
    return {field.name: empty.get(get_origin(types[field.name]) or types[field.name]) for field in missing}


def _module(name: str) -> ModuleType:
    path = f"mlx_lm.models.{name}"
    if name != "olmo" or path in sys.modules or _PROBED in sys.modules:
        return importlib.import_module(path)
    sys.modules[_PROBED] = ModuleType(_PROBED)
    try:
        return importlib.import_module(path)
    finally:
        del sys.modules[_PROBED]

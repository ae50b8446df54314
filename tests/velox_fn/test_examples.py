"""The examples in the docstrings of velox_fn work, and every public factory has one."""

import doctest
import importlib
from pathlib import Path

import pytest

import velox_fn

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "velox_fn").rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_work(name):
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted > 0
    assert tried.failed == 0


@pytest.mark.parametrize("name", velox_fn.METHODS)
def test_a_factory_shows_an_example(name):
    assert ">>>" in (velox_fn.METHODS[name].__doc__ or "")

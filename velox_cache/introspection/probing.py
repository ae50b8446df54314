"""Calls of a model that are to find something out, and leave nothing behind in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Undo what calls inside the `with` set on the model's modules.

    A model of mlx_vlm keeps the positions of a prompt's tokens between its calls; those of a probe's tokens would be
    taken for those of the user's prompt.
    """
    before = [(module, dict(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, items, attributes in before:
            for now, then in ((module, items), (vars(module), attributes)):
                for name in now.keys() - then.keys():
                    dict.pop(now, name)
                dict.update(now, then)

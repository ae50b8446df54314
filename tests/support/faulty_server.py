"""Serve a model whose prefill fails on the token of "!".

python faulty_server.py FOLDER PORT {batched,alone} [SETTING=NUMBER ...]
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import velox_cache as vc
from velox_cache.serve import serve

FAULT = 0  # "!" is the first symbol of the tokenizer


def fail_on_token(model: nn.Module) -> None:
    whole = type(model)

    def call(self: nn.Module, inputs: mx.array, cache: Any = None) -> Any:
        if inputs.shape[1] > 1 and (inputs == FAULT).any().item():
            raise RuntimeError("this token cannot be computed")
        return whole.__call__(self, inputs, cache=cache)

    model.__class__ = type(whole.__name__, (whole,), {"__module__": whole.__module__, "__call__": call})


if __name__ == "__main__":
    folder, port, kind, *given = sys.argv[1:]
    settings: dict[str, Any] = {name: int(value) for name, value in (setting.split("=") for setting in given)}

    def install(model: nn.Module) -> object:
        fail_on_token(model)
        return vc.install(model, "qfilters", calibrate=False, budget=40, calib_tokens=16, **settings)

    serve(folder, install, ["--port", port, *(["--kv-bits", "8"] if kind == "alone" else [])])

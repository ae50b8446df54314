"""Serve a model whose prefill fails on the token of a quotation mark, or whose caches do.

python faulty_server.py FOLDER PORT {batched,alone} [SETTING=NUMBER | method=NAME ...]

A quotation mark and then the letter number i of the alphabet in a prompt: the method number i of CALLS raises, once.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import velox_cache as vc
from velox_cache.serve import serve

FAULT = 1  # the quotation mark is the second symbol of the tokenizer; the first is what mlx_lm pads prompts with
FIRST_LETTER = ord("a") - ord("!")
CALLS = ("update_and_fetch", "make_mask", "merge", "extend", "filter", "extract", "prepare", "finalize", "nbytes")
KINDS = (RuntimeError, MemoryError, StopIteration, KeyError, AssertionError)  # in turn

to_fail: list[str] = []


def fail_on_token(model: nn.Module) -> None:
    whole = type(model)

    def call(self: nn.Module, inputs: mx.array, cache: Any = None) -> Any:
        tokens = inputs.flatten().tolist()
        if inputs.shape[1] > 1 and FAULT in tokens:
            letter = (*tokens, FAULT)[tokens.index(FAULT) + 1] - FIRST_LETTER
            if not 0 <= letter < len(CALLS):
                raise RuntimeError("this token cannot be computed")
            to_fail[:] = [CALLS[letter]]
        return whole.__call__(self, inputs, cache=cache)

    model.__class__ = type(whole.__name__, (whole,), {"__module__": whole.__module__, "__call__": call})


def fail_when_called(name: str, kind: type[Exception]) -> None:
    """Have this method of every cache raise when its turn has come."""
    theirs = vars(vc.EvictingKVCache)[name]
    whole: Callable[..., Any] = getattr(theirs, "__func__", getattr(theirs, "fget", theirs))

    def call(*given: Any, **named: Any) -> Any:
        if name in to_fail:
            to_fail.clear()
            logging.info(f"{name} fails")
            raise kind(f"{name} cannot be done")
        return whole(*given, **named)

    kept_as = type(theirs) if isinstance(theirs, property | classmethod) else lambda function: function
    setattr(vc.EvictingKVCache, name, kept_as(call))


if __name__ == "__main__":
    folder, port, kind, *given = sys.argv[1:]
    said = dict(setting.split("=") for setting in given)
    method = said.pop("method", "qfilters")
    settings: dict[str, Any] = {name: int(value) for name, value in said.items()}
    if method == "qfilters":
        settings["calib_tokens"] = 16
    for i, name in enumerate(CALLS):
        fail_when_called(name, KINDS[i % len(KINDS)])

    def install(model: nn.Module) -> object:
        fail_on_token(model)
        return vc.install(model, method, budget=40, calibrate=False, **settings)

    serve(folder, install, ["--port", port, *(["--kv-bits", "8"] if kind == "alone" else [])])

"""mlx_lm's own OpenAI-compatible server, with evicting caches installed on every model that it loads."""

import _thread
import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.nn as nn
import mlx_lm.server
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider

Install = Callable[[nn.Module], object]
"""Puts evicting caches into a loaded model; what it returns is logged."""


class EvictingModelProvider(ModelProvider):
    """mlx_lm's model provider; `install` bounds the caches of each model it loads."""

    def __init__(self, cli_args: argparse.Namespace, install: Install) -> None:
        _refuse_draft(cli_args.draft_model)
        super().__init__(cli_args)
        self._install = install
        self.failure: Exception | None = None

    def load_default(self) -> None:
        """Load the model that the server was started for; if that fails, end the server, which could only refuse."""
        try:
            super().load_default()
        except Exception as error:  # anything: this runs in the server's own thread, where nobody would see it
            self.failure = error
            _thread.interrupt_main()

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        _refuse_draft(draft_model_path)
        super()._load(model_path, adapter_path, draft_model_path)
        try:
            logging.info(str(self._install(self.model)))
        except BaseException:
            self.reset()  # a model that cannot be bounded must not be served unbounded by the next request
            raise
        # Anew, since budgets that differ between layers cannot be batched.
        self.is_batchable = all(hasattr(cache, "merge") for cache in make_prompt_cache(self.model))


def serve(model: str, install: Install, server_options: Sequence[str] = ()) -> None:
    """Run mlx_lm.server for `model` in the main thread, until interrupted.

    install: puts evicting caches into a loaded model, such as `lambda model: velox_cache.install(model, budget=1024)`;
    no `rollback`, since the server's prompt cache takes back any number of tokens where a cache can be trimmed at all.
    server_options: arguments of `mlx_lm.server` as on its command line; see `mlx_lm.server --help`.

    Raises what loading or `install` raised, and ValueError for a draft model: speculative decoding needs a rollback.
    """
    providers: list[EvictingModelProvider] = []

    def provider(cli_args: argparse.Namespace) -> EvictingModelProvider:
        providers.append(EvictingModelProvider(cli_args, install))
        return providers[-1]

    with _standing_in(provider, ["--model", model, *server_options]):
        try:
            mlx_lm.server.main()
        except KeyboardInterrupt:
            if all(made.failure is None for made in providers):
                raise
    for made in providers:
        if made.failure is not None:
            raise made.failure


@contextmanager
def _standing_in(provider: Callable[[argparse.Namespace], ModelProvider], options: list[str]) -> Iterator[None]:
    """mlx_lm.server's main takes its options from sys.argv and its provider by name: give it ours meanwhile."""
    names, arguments = vars(mlx_lm.server), sys.argv
    theirs = names["ModelProvider"]
    names["ModelProvider"], sys.argv = provider, ["mlx_lm.server", *options]
    try:
        yield
    finally:
        names["ModelProvider"], sys.argv = theirs, arguments


def _refuse_draft(draft_model: str | None) -> None:
    if draft_model is not None:
        raise ValueError(
            f"draft_model={draft_model!r}: the server's prompt cache may take back any number of tokens, which "
            "evicting caches cannot; drop the draft, or use mlx_lm.stream_generate(draft_model=...) after "
            "install(rollback=...)"
        )

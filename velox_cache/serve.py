"""mlx_lm's own OpenAI-compatible server, with evicting caches installed on every model that it loads."""

import _thread
import argparse
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx_lm.server
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider

from velox_cache.serving.failures import FailureHandler
from velox_cache.serving.generation import ServingGenerator, make_sampler
from velox_cache.serving.prompt_prefixes import PromptPrefixes

Install = Callable[..., object]
"""Puts evicting caches into a loaded model; what it returns is logged. Where it has an argument `tokenizer`, as
`velox_cache.install` has, it is given the model's."""


class EvictingModelProvider(ModelProvider):
    """mlx_lm's model provider; `install` bounds the caches of each model it loads."""

    def __init__(self, cli_args: argparse.Namespace, install: Install) -> None:
        _refuse_draft(cli_args.draft_model)
        super().__init__(cli_args)
        _warn_of_quantised_rows(cli_args)
        self._install = install
        self.failure: Exception | None = None

    def load_default(self) -> None:
        """Load the model that the server was started for; if that fails, end the server, which could only refuse."""
        if self.model is not None:  # the thread begins anew after a batch that failed
            return
        try:
            super().load_default()
        except Exception as error:  # anything: this runs in the server's own thread, where nobody would see it
            self.failure = error
            _thread.interrupt_main()

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        """The model and its tokenizer, with the adapter of the request if it names one.

        mlx_lm knows "default_model" by its adapter too, and would answer without the request's: told by its path.
        """
        if adapter_path is not None:
            model_path = self._model_map.get(model_path, model_path)
        model, tokenizer = super().load(model_path, adapter_path, draft_model_path)
        return model, tokenizer

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        _refuse_draft(draft_model_path)
        super()._load(model_path, adapter_path, draft_model_path)
        try:
            takes_one = "tokenizer" in inspect.signature(self._install).parameters
            logging.info(str(self._install(self.model, **({"tokenizer": self.tokenizer} if takes_one else {}))))
        except BaseException:
            self.reset()  # a model that cannot be bounded must not be served unbounded by the next request
            raise
        # Anew, since budgets that differ between layers cannot be batched on every model.
        self.is_batchable = all(hasattr(cache, "merge") for cache in make_prompt_cache(self.model))


def serve(model: str, install: Install, server_options: Sequence[str] = (), *, pin_system: bool = False) -> None:
    """Run mlx_lm.server for `model` in the main thread, until interrupted.

    install: puts evicting caches into a loaded model, such as `functools.partial(velox_cache.install, budget=1024)`;
    no `rollback`, since the server's prompt cache takes back any number of tokens where a cache can be trimmed at all.
    pin_system: everything up to the end of a chat's system message stays in its cache, as `EvictingKVCache.pin` has it;
    a request whose system message would fill the budget is refused.
    server_options: arguments of `mlx_lm.server` as on its command line; see `mlx_lm.server --help`.

    Raises what loading or `install` raised, and ValueError for a draft model: speculative decoding needs a rollback.
    """
    provider: list[EvictingModelProvider] = []
    generator: list[ServingGenerator] = []

    def make_provider(cli_args: argparse.Namespace) -> EvictingModelProvider:
        provider.append(EvictingModelProvider(cli_args, install))
        return provider[0]

    def make_generator(*arguments: Any) -> ServingGenerator:
        generator.append(ServingGenerator(*arguments, pin_system=pin_system))
        return generator[0]

    parts: dict[str, Callable[..., Any]] = {
        "ModelProvider": make_provider,
        "ResponseGenerator": make_generator,
        "LRUPromptCache": PromptPrefixes,
        "_make_sampler": make_sampler,
        "_run_http_server": partial(mlx_lm.server._run_http_server, handler_class=FailureHandler),
    }
    with _standing_in(["--model", model, *server_options], parts):
        try:
            mlx_lm.server.main()
        except KeyboardInterrupt:
            if provider[0].failure is None:
                raise
        finally:
            for started in generator:  # whose thread would keep the process alive, as when the port is taken
                started.stop_and_join()
    if provider[0].failure is not None:
        raise provider[0].failure


@contextmanager
def _standing_in(options: list[str], parts: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """mlx_lm.server's main takes its options from sys.argv and its parts by name: give it ours meanwhile.

    It ends on an interrupt. Interrupts are switched on even where a shell started the process with them ignored (`&`).
    """
    names, arguments = vars(mlx_lm.server), sys.argv
    theirs = {name: names[name] for name in parts}
    hearing = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["mlx_lm.server", *options]
    names.update(parts)
    try:
        yield
    finally:
        names.update(theirs)
        sys.argv = arguments
        signal.signal(signal.SIGINT, hearing)


def _warn_of_quantised_rows(cli_args: argparse.Namespace) -> None:
    """Say at the start what mlx_lm's own --kv-bits does: it quantises rows, and ends batching."""
    if cli_args.kv_bits is not None:
        logging.warning(
            f"--kv-bits {cli_args.kv_bits} among mlx_lm's options: with it mlx_lm serves one request at a time; give "
            "it before --server-options, or bits= to install, to serve quantised rows in batches"
        )


def _refuse_draft(draft_model: str | None) -> None:
    if draft_model is not None:
        raise ValueError(
            f"draft_model={draft_model!r}: the server's prompt cache may take back any number of tokens, which "
            "evicting caches cannot; drop the draft, or use mlx_lm.stream_generate(draft_model=...) after "
            "install(rollback=...)"
        )

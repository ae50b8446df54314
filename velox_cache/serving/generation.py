"""The server's generation thread."""

import logging
from typing import Any

import mlx.core as mx
import mlx_lm.server
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import CompletionRequest, GenerationArguments, ModelProvider, ResponseGenerator

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.query_tap import row_caches
from velox_cache.serving.failures import RequestFailedError, refusing
from velox_cache.serving.prompt_prefixes import PromptPrefixes
from velox_cache.serving.replies import RepeatedSampling, Replies, Sampler, sampler_after
from velox_cache.serving.system_prompt import system_end

_make_sampler = mlx_lm.server._make_sampler


class ServingGenerator(ResponseGenerator):
    """mlx_lm's generation thread, in which a request that fails fails alone.

    One that is served alone does so in mlx_lm. What goes wrong in a batch may be the doing of any request in it. So
    the batch is given up, and each request is served again, alone, with the tokens that its client already has.

    With `pin_system` each chat's cache pins all up to the end of its system message.

    It takes its streams down when it ends: left over, they abort the process.
    """

    def __init__(
        self, model_provider: ModelProvider, prompt_cache: PromptPrefixes, *, pin_system: bool = False
    ) -> None:
        self._pin_system = pin_system
        self._prefixes = prompt_cache
        self._in_hand: list[Replies] = []
        self._arrived = 0
        limit = model_provider.cli_args.prompt_cache_bytes
        if limit is not None:  # mlx_lm holds it for batches only, and there when a request comes
            prompt_cache.max_bytes = limit
        super().__init__(model_provider, prompt_cache)  # starts the thread

    def _generate(self) -> None:
        try:
            while self._failed():
                for replies in self._in_hand:
                    if replies.wanted:
                        self._serve_again(replies)
        finally:
            mx.clear_streams()

    def _failed(self) -> bool:
        """Generate until the server stops, False, or until something fails that the requests in hand explain, True.

        Ranks of one model go on in step or not at all, so there every failure is raised.
        """
        self._arrived = 0
        try:
            super()._generate()
        except Exception:  # anything that a cache, a model or a sampler raises
            if self._is_distributed or not self._arrived:
                raise
            logging.exception("a batch failed; each of its requests is served again, alone")
            return True
        return False

    def _serve_again(self, replies: Replies) -> None:
        try:
            self.model_provider.load(
                replies.arguments.model.model, replies.arguments.model.adapter, replies.arguments.model.draft
            )
        except Exception as error:
            replies.put(error)
            return
        stream = mx.default_stream(mx.default_device())
        self._serve_single((replies, replies.request, replies.again()), stream)

    def _next_request(self, timeout: float | None = None) -> tuple[Any, Any, Any] | None:
        arrived = super()._next_request(timeout)
        if arrived is None:
            return None
        self._arrived += 1
        replies = Replies(*arrived)
        self._in_hand = [*(one for one in self._in_hand if one.wanted), replies]
        return replies, replies.request, replies.arguments

    def _tokenize(self, tokenizer: Any, request: CompletionRequest, args: GenerationArguments) -> tuple[Any, ...]:
        if request.request_type == "text" and not isinstance(request.prompt, str):
            raise RequestFailedError(
                400,
                f"prompt must be one string, got {type(request.prompt).__name__}; send a request for each of several "
                "prompts: those that come together are served together",
            )
        with refusing("prompt" if request.request_type == "text" else "messages"):
            tokenized: tuple[Any, ...] = super()._tokenize(tokenizer, request, args)
        if not tokenized[0]:
            raise RequestFailedError(400, "the prompt has no tokens, so there is nothing to go on from; send some text")
        if self._pin_system:
            with refusing("the system message, which the server was told to pin,"):
                self._begin_pinned(tokenizer, request, args, tokenized[0])
        with refusing(f"stop={args.stop_words!r}"):  # here, since mlx_lm makes it, and keeps it, where nothing may fail
            self._make_state_machine(self.model_provider.model_key, tokenizer, args.stop_words)
        return tokenized

    def _begin_pinned(
        self, tokenizer: Any, request: CompletionRequest, args: GenerationArguments, prompt: list[int]
    ) -> None:
        """Have the store answer the look-up that follows, for this prompt, with caches that pin its system message."""
        end = 0
        if request.request_type == "chat":
            template = {**self.model_provider.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
            end = system_end(tokenizer, request.messages, prompt, {"tools": request.tools, **template})
        fresh = make_prompt_cache(self.model_provider.model) if end else None
        for cache in row_caches(fresh or []):
            if isinstance(cache, EvictingKVCache):
                cache.pin([(0, end)])
        self._prefixes.begin_with(fresh)


def make_sampler(args: GenerationArguments, tokenizer: Any) -> Sampler:
    """mlx_lm's sampler for a request; for one that is served again, after the tokens that its client has."""
    sampler = _make_sampler(args, tokenizer)
    return sampler_after(args.sampling.given, sampler) if isinstance(args.sampling, RepeatedSampling) else sampler

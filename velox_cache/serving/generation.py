"""The server's generation thread."""

from typing import Any

import mlx.core as mx
from mlx_lm.server import CompletionRequest, GenerationArguments, ResponseGenerator

from velox_cache.serving.failures import RequestFailedError, refusing


class ServingGenerator(ResponseGenerator):
    """mlx_lm's generation thread, which refuses what it cannot generate from.

    It takes its streams down when it ends: left over, they abort the process.
    """

    def _generate(self) -> None:
        try:
            super()._generate()
        finally:
            mx.clear_streams()

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
        with refusing(f"stop={args.stop_words!r}"):  # here, since mlx_lm makes it, and keeps it, where nothing may fail
            self._make_state_machine(self.model_provider.model_key, tokenizer, args.stop_words)
        return tokenized

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

import mlx.nn as nn

from .models.cache import LRUPromptCache

class ModelProvider:
    cli_args: argparse.Namespace
    model_key: Any
    model: nn.Module
    tokenizer: Any
    is_batchable: bool
    _model_map: dict[str, str]
    def __init__(self, cli_args: argparse.Namespace) -> None: ...
    def load_default(self) -> None: ...
    def reset(self) -> None: ...
    def load(
        self, model_path: str, adapter_path: str | None = ..., draft_model_path: str | None = ...
    ) -> tuple[nn.Module, Any]: ...
    def _load(self, model_path: str, adapter_path: str | None = ..., draft_model_path: str | None = ...) -> None: ...

class CompletionRequest:
    request_type: str
    prompt: Any
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

@dataclass
class SamplingArguments: ...

@dataclass
class ModelDescription:
    model: str
    draft: str | None
    adapter: str | None

@dataclass
class GenerationArguments:
    model: ModelDescription
    sampling: SamplingArguments
    max_tokens: int
    stop_words: list[str]
    chat_template_kwargs: dict[str, Any] | None

class GenerationContext:
    _should_stop: bool
    def stop(self) -> None: ...

class Response:
    token: int

class ResponseGenerator:
    model_provider: ModelProvider
    prompt_cache: LRUPromptCache
    _is_distributed: bool
    def __init__(self, model_provider: ModelProvider, prompt_cache: LRUPromptCache) -> None: ...
    def _generate(self) -> None: ...
    def _next_request(self, timeout: float | None = ...) -> tuple[Any, Any, Any] | None: ...
    def _tokenize(self, tokenizer: Any, request: CompletionRequest, args: GenerationArguments) -> tuple[Any, ...]: ...
    def _make_state_machine(self, model_key: Any, tokenizer: Any, stop_words: list[str]) -> Any: ...
    def _serve_single(self, request: tuple[Any, Any, Any], stream: Any) -> None: ...
    def stop_and_join(self) -> None: ...

class APIHandler(BaseHTTPRequestHandler):
    stream: bool
    _headers_buffer: list[bytes]
    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None: ...
    def _set_completion_headers(self, status_code: int = ...) -> None: ...

def _make_sampler(args: GenerationArguments, tokenizer: Any) -> Callable[[Any], Any]: ...
def _run_http_server(*args: Any, **kwargs: Any) -> None: ...
def main() -> None: ...

"""A request that fails: what its client is told, while the server goes on."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm.server import APIHandler, CompletionRequest


class RequestFailedError(Exception):
    """Why one request is not answered. status: of the HTTP reply, 400 where the request is at fault, else 500."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """RequestFailedError with status 400 for whatever goes wrong with `what`, which the request brought."""
    try:
        yield
    except Exception as error:  # anything: templates, tokenizers and decoders of images raise as they like
        raise RequestFailedError(400, f"{what} cannot be used: {error}") from error


class FailureHandler(APIHandler):
    """mlx_lm's HTTP handler, which gives a failed request the status of its failure, also when the text has begun."""

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        """Answer with the model's text, or with why there is none."""
        try:
            super().handle_completion(request, stop_words)
        except OSError:  # the client has gone
            raise
        except RequestFailedError as failure:
            self._answer(failure)
        except Exception as error:  # what reads tool calls out of the text, for one, raises as it likes
            self._answer(RequestFailedError(500, f"{type(error).__name__}: {error}"))

    def _answer(self, failure: RequestFailedError) -> None:
        """Send why there is no text, or no more of it: a stream's headers are sent by then, others are not."""
        logging.error(str(failure))
        if self.stream:
            event = json.dumps({"error": {"message": str(failure)}})  # the form that clients look into
            self.wfile.write(f"data: {event}\n\n".encode())
        else:
            self._headers_buffer.clear()
            self._set_completion_headers(failure.status)
            self.end_headers()
            self.wfile.write(json.dumps({"error": str(failure)}).encode())

    def _set_completion_headers(self, status_code: int = 200) -> None:
        failure: Any = sys.exception()  # mlx_lm calls this where it handles one, with 404 for every kind
        super()._set_completion_headers(failure.status if isinstance(failure, RequestFailedError) else status_code)

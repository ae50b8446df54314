"""What the generation thread has told one client, so that its request can be served again from the start."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import Any

import mlx.core as mx
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    Response,
    SamplingArguments,
)

from velox_cache.serving.failures import RequestFailedError

Sampler = Callable[[mx.array], mx.array]


@dataclass
class RepeatedSampling(SamplingArguments):
    """The sampling of a request that is served again: first the tokens that its client has."""

    given: tuple[int, ...] = ()


@dataclass(eq=False)
class Replies:
    """A request, and the queue to its client: what the generation thread puts there it may put again."""

    queue: Queue[Any]
    request: CompletionRequest
    arguments: GenerationArguments
    given: list[int] = field(default_factory=list)  # the tokens that the client has
    context: GenerationContext | None = None  # the one that the client has, and stops
    ended: bool = False
    _latest: GenerationContext | None = None  # the one that the generation thread looks at
    _repeated: int = 0  # how many of the tokens given are still to come again

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for the rest."""
        return not self.ended and not (self.context is not None and self.context._should_stop)

    def put(self, item: Any) -> None:
        """Pass on what is new to the client. A failure once the text has begun is the server's, status 500."""
        if isinstance(item, GenerationContext):
            self._latest = item
            if self.context is not None:
                return
            self.context = item
        elif isinstance(item, Response):
            if not self.wanted and self._latest is not None:
                self._latest.stop()
            if self._repeated:
                self._repeated -= 1
                return
            self.given.append(item.token)
        elif item is None or isinstance(item, Exception):
            self.ended = True
            if isinstance(item, Exception) and self.context is not None:
                item = RequestFailedError(500, f"{type(item).__name__}: {item}")
        self.queue.put(item)

    def again(self) -> GenerationArguments:
        """Arguments to serve the request again with: what comes for them is passed on from where the client is."""
        self._repeated = len(self.given)
        sampling = RepeatedSampling(**vars(self.arguments.sampling), given=tuple(self.given))
        return replace(self.arguments, sampling=sampling)


def sampler_after(given: Iterable[int], sampler: Sampler) -> Sampler:
    """`sampler`, after the tokens given."""
    first = iter(given)

    def sample(logprobs: mx.array) -> mx.array:
        token = next(first, None)
        return sampler(logprobs) if token is None else mx.array([token], mx.uint32)

    return sample

"""Which masks a model asks its plain KV caches for, seen in one call that computes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from velox_cache.introspection.cache_kinds import is_plain, with_parts
from velox_cache.introspection.probing import left_as_it_was


@dataclass(frozen=True)
class MasksAskedFor:
    """What `make_mask` was called with, over all plain caches."""

    arrays: bool = False  # a mask as an array, which fits one number of rows only
    windows: bool = False  # a sliding window over a cache that keeps every row


def masks_asked_for(model: nn.Module, caches: Sequence[Any]) -> MasksAskedFor:
    """The masks that `model` makes from `caches`, empty ones of its own kind.

    The model is called on two tokens and its result dropped: MLX evaluates nothing, so that weights which are not
    loaded yet stay so. A model that cannot be called here (without a Metal device, say) asks for nothing.
    """
    asked: list[MasksAskedFor] = []

    def listening(cache: Any) -> Any:
        return _ListeningKVCache(asked) if is_plain(cache) else cache

    try:
        with left_as_it_was(model):
            model(mx.array([[0, 1]]), cache=[with_parts(cache, listening) for cache in caches])
    except Exception:  # whatever it is, the caller's own first call says it better
        return MasksAskedFor()
    return MasksAskedFor(any(mask.arrays for mask in asked), any(mask.windows for mask in asked))


class _ListeningKVCache(KVCache):
    """A KVCache that notes how it is asked for masks."""

    def __init__(self, asked: list[MasksAskedFor]) -> None:
        super().__init__()
        self._asked = asked

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        self._asked.append(MasksAskedFor(return_array, window_size is not None))
        return super().make_mask(N, return_array=return_array, window_size=window_size)

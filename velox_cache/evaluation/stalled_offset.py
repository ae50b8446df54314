"""What it costs when positions stop at the budget: an ablation of the rule that offsets count tokens, not rows.

A cache that says how many rows it holds, in place of how many tokens it saw, gives every later token the same position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.harness.arms import MakeCache
from velox_cache.harness.fidelity import Fidelity, fidelity
from velox_cache.harness.perplexity import perplexity
from velox_cache.harness.reading import Reading, read_passage
from velox_cache.harness.unreached import warn_where_nothing_leaves


class StalledCache:
    """An evicting cache whose `offset` is the rows that it holds. All else is the cache's own."""

    def __init__(self, cache: EvictingKVCache) -> None:
        self._cache = cache

    @property
    def offset(self) -> int:
        return self._cache.size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@dataclass(frozen=True)
class StalledReading:
    """One way to count, on the passage."""

    positions: str  # "full cache", "tokens seen" or "rows held"
    perplexity: float
    fidelity: Fidelity  # with the full cache


def stalled_offset(
    model: nn.Module,
    tokens: Sequence[int],
    make: MakeCache,
    *,
    n_context: int,
    prefill_step_size: int = 512,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> list[StalledReading]:
    """Read `tokens` under the full cache, under the caches of `make`, and under those with stalled offsets.

    The context goes in in blocks of `prefill_step_size`, the rest token by token. make: caches of a method that needs
    no queries. Warns where they evicted nothing. Raises ValueError as `read_passage` does.
    """

    def stalled() -> list[Any]:
        return [StalledCache(cache) if isinstance(cache, EvictingKVCache) else cache for cache in make()]

    readings: dict[str, Reading] = {}
    ways: dict[str, MakeCache] = {
        "full cache": lambda: make_prompt_cache(model),
        "tokens seen": make,
        "rows held": stalled,
    }
    for name, caches in ways.items():
        readings[name] = read_passage(
            model, tokens, n_context=n_context, prefill_step_size=prefill_step_size, caches=caches(), advance=advance
        )
    warn_where_nothing_leaves([readings["tokens seen"].usage.rows_kept], len(tokens) - 1)
    return [
        StalledReading(name, perplexity(one), fidelity(one, readings["full cache"])) for name, one in readings.items()
    ]

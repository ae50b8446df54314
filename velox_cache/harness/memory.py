"""What a prompt cache holds, against what the full cache would."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.harness.summary import summary
from velox_cache.introspection.query_tap import observe_queries


@dataclass(frozen=True)
class CacheUsage:
    """Rows and bytes of one sequence's prompt cache."""

    tokens_seen: int
    rows_kept: int  # of a head that could be bounded, in the mean
    kept_bytes: int  # of kept rows in all layers, and what methods hold beside them
    full_bytes: int  # of the rows of every token seen, where layers are bounded; the same as kept_bytes elsewhere
    elsewhere_bytes: int = 0  # of both, what is held where layers bound themselves

    @property
    def compression(self) -> float:
        """full_bytes / kept_bytes; 1.0 for an empty cache."""
        return self.full_bytes / self.kept_bytes if self.kept_bytes else 1.0


def cache_usage(prompt_cache: Sequence[Any]) -> CacheUsage:
    """Sum up the caches of all layers. Room that a cache has set aside but not filled does not count.

    Caches that are neither evicting nor plain (sliding windows, recurrent state) count with the bytes that they hold.
    """
    found = summary(prompt_cache)
    tokens_seen = max((entry.tokens or 0 for entry in found.layers), default=0)
    with_rows = [(entry.rows, entry.full_bytes) for entry in found.layers if entry.rows is not None]
    full_bytes = sum(size for _, size in with_rows)
    rows_kept = round(sum(rows * size for rows, size in with_rows) / full_bytes) if full_bytes else 0
    elsewhere = sum(entry.kept_bytes for entry in found.layers if entry.rows is None)
    return CacheUsage(tokens_seen, rows_kept, found.kept_bytes, found.full_bytes, elsewhere)


@dataclass(frozen=True)
class MemoryUse:
    """What one cache took, beside the model's weights."""

    usage: CacheUsage
    held_bytes: int  # of all arrays in the caches, rows set aside included
    peak_bytes: int  # most that MLX held at once while the tokens were read, above what it held before
    steps_peak_bytes: int  # the same while the last ones were read one by one


def memory_use(
    model: nn.Module, make_cache: Callable[[], list[Any]], tokens: Sequence[int], step: int, *, n_steps: int = 0
) -> MemoryUse:
    """Read `tokens` in blocks of `step`, the last `n_steps` one by one, from fresh caches, and say what they took."""
    caches = make_cache()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()

    def peak(start: int, stop: int, step: int) -> int:
        mx.reset_peak_memory()
        for at in range(start, stop, step):
            model(mx.array([list(tokens[at : min(at + step, stop)])]), cache=caches)
            mx.eval([cache.state for cache in caches])
        return mx.get_peak_memory() - before

    n_in_blocks = len(tokens) - n_steps
    with observe_queries(model):
        peaks = peak(0, n_in_blocks, step), peak(n_in_blocks, len(tokens), 1)
    return MemoryUse(cache_usage(caches), summary(caches).held_bytes, max(peaks), peaks[1])

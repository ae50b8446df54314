"""What each cache of a prompt cache holds, beside what the full cache would."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.cache_kinds import is_plain
from velox_cache.introspection.query_tap import row_caches


@dataclass(frozen=True)
class LayerSummary:
    """One cache. Of a batch, rows and tokens are those of its first sequence, bytes those of all."""

    layer: int  # index in the prompt cache
    method: str  # that evicts its rows; the class of a cache that is not evicting
    rows: int | None  # kept; None for a cache that bounds itself (a sliding window, a recurrent state)
    tokens: int | None  # seen; None likewise
    held_bytes: int  # of all arrays, room that is set aside included
    kept_bytes: int  # of the kept rows, and of what the method holds beside them
    full_bytes: int  # of the rows of every token seen; the same as kept_bytes of a cache that bounds itself

    @property
    def ratio(self) -> float:
        """full_bytes / kept_bytes; 1.0 for an empty cache."""
        return self.full_bytes / self.kept_bytes if self.kept_bytes else 1.0


@dataclass(frozen=True)
class CacheSummary:
    """All caches of a prompt cache, layer by layer, and what they come to. `str` of it is a table."""

    layers: tuple[LayerSummary, ...]

    @property
    def held_bytes(self) -> int:
        return sum(entry.held_bytes for entry in self.layers)

    @property
    def kept_bytes(self) -> int:
        return sum(entry.kept_bytes for entry in self.layers)

    @property
    def full_bytes(self) -> int:
        return sum(entry.full_bytes for entry in self.layers)

    @property
    def ratio(self) -> float:
        """full_bytes / kept_bytes; 1.0 for empty caches."""
        return self.full_bytes / self.kept_bytes if self.kept_bytes else 1.0

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("layers", "method", "rows", "tokens", "held", "kept", "full cache", "ratio")]
        for alike, entries in groupby(self.layers, key=_without_layer):
            layers = [entry.layer for entry in entries]
            named = str(layers[0]) if layers[0] == layers[-1] else f"{layers[0]}-{layers[-1]}"
            method, rows, tokens, *sizes = alike
            counts = ("-" if count is None else str(count) for count in (rows, tokens))
            lines.append((named, method, *counts, *_sizes(*(size * len(layers) for size in sizes))))
        lines.append(("all", "", "", "", *_sizes(self.held_bytes, self.kept_bytes, self.full_bytes)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
                + [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
            )
            for line in lines
        )


def summary(prompt_cache: Sequence[Any]) -> CacheSummary:
    """What the caches of a model hold now, one entry per layer, and what the full cache would hold.

    prompt_cache: as `make_prompt_cache(model)` or `load_prompt_cache(path)` gives it; caches that are not evicting are
    described too. Bytes are counted from shapes: nothing waits for the device.
    """
    return CacheSummary(
        tuple(_summary_of(layer, cache) for layer, entry in enumerate(prompt_cache) for cache in row_caches([entry]))
    )


def _summary_of(layer: int, cache: Any) -> LayerSummary:
    if isinstance(cache, EvictingKVCache):
        rows, tokens = cache.tokens_kept, cache.tokens_seen
        sizes = cache.nbytes, cache.kept_bytes, cache.full_seq_bytes
        return LayerSummary(layer, cache.method.name, rows, tokens, *sizes)
    name, held = type(cache).__name__, cache.nbytes
    if not is_plain(cache):
        return LayerSummary(layer, name, None, None, held, held, held)
    rows = cache.offset
    filled = 0 if cache.keys is None else sum(x.nbytes // x.shape[2] * rows for x in (cache.keys, cache.values))
    return LayerSummary(layer, name, rows, rows, held, filled, filled)


def _without_layer(entry: LayerSummary) -> tuple[Any, ...]:
    return entry.method, entry.rows, entry.tokens, entry.held_bytes, entry.kept_bytes, entry.full_bytes


def _sizes(held: int, kept: int, full: int) -> tuple[str, ...]:
    return (*(f"{size / 2**20:.1f} MiB" for size in (held, kept, full)), f"{full / kept:.1f}" if kept else "1.0")

"""Which heads each tier of a layer holds: arrays split by tier, and put together again."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx


@dataclass(frozen=True)
class TierHeads:
    """The KV heads of each tier, ascending within it. Together they are all heads of the layer, each once."""

    of_each: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "of_each", tuple(map(tuple, self.of_each)))
        together = list(itertools.chain.from_iterable(self.of_each))
        apart = all(heads and list(heads) == sorted(heads) for heads in self.of_each)
        if not together or not apart or sorted(together) != list(range(len(together))):
            raise ValueError(
                f"the tiers of a layer hold its heads 0 to n - 1, each once and in ascending order, got {self.of_each}"
            )

    @cached_property
    def n_heads(self) -> int:
        """KV heads of the layer."""
        return sum(map(len, self.of_each))

    @cached_property
    def _order(self) -> tuple[int, ...] | None:
        """Where each head stands when tiers stand one after another; None where it is in its place."""
        together = list(itertools.chain.from_iterable(self.of_each))
        return None if together == sorted(together) else tuple(together.index(head) for head in range(self.n_heads))

    def split(self, whole: mx.array, axis: int = 1) -> list[mx.array]:
        """What of an array belongs to each tier. Its axis is that of the KV heads, or of query heads: consecutive ones
        share a KV head."""
        n_shared = whole.shape[axis] // self.n_heads
        return [_picked(whole, heads, n_shared, axis) for heads in self.of_each]

    def joined(self, parts: Sequence[mx.array]) -> mx.array:
        """The whole again, of the parts [B,H,...] of the tiers."""
        together = mx.concatenate(list(parts), axis=1)
        return together if self._order is None else _picked(together, self._order, together.shape[1] // self.n_heads, 1)


def _picked(whole: mx.array, heads: Sequence[int], n_shared: int, axis: int) -> mx.array:
    """The heads, of which each has `n_shared` entries: a slice where they are consecutive."""
    first, n = heads[0], len(heads)
    if tuple(heads) == tuple(range(first, first + n)):
        entries = slice(first * n_shared, (first + n) * n_shared)
        return whole[(slice(None),) * axis + (entries,)]
    index = [head * n_shared + i for head in heads for i in range(n_shared)]
    return mx.take(whole, mx.array(index), axis=axis)

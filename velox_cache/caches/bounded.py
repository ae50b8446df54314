"""What every bounded cache of a layer has, however its rows are held."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import mlx.core as mx


class BoundedKVCache(ABC):
    """A bounded cache of one attention layer: what follows from its state, its batches and its bytes."""

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Take in keys [B,H,S,D] and values [B,H,S,D_v]; what this block's queries may attend to."""

    @abstractmethod
    def observe_queries(
        self, output: mx.array, queries: mx.array, keys: Any, values: Any, scale: float, **terms: Any
    ) -> mx.array:
        """Score the last block by its queries; the attention output, tied to what follows from it."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """Everything needed to go on."""

    @state.setter
    @abstractmethod
    def state(self, packed: Sequence[Any]) -> None: ...

    @property
    @abstractmethod
    def merge(self) -> Callable[[Sequence[Any]], Self]:
        """(caches) -> one batched cache with a sequence for each."""

    @abstractmethod
    def prepare(self, *, left_padding: Sequence[int] | None = None) -> None:
        """Announce a prefill with padding."""

    @property
    @abstractmethod
    def offset(self) -> int | mx.array:
        """Tokens seen."""

    @property
    @abstractmethod
    def tokens_seen(self) -> int:
        """Tokens passed to the first sequence of the batch."""

    @property
    @abstractmethod
    def kept_bytes(self) -> int:
        """Bytes of the kept rows, and of what the method holds beside them."""

    @property
    @abstractmethod
    def full_seq_bytes(self) -> int:
        """Bytes that the rows of all tokens seen would take."""

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Self:
        """A cache that goes on where the one that gave `state` stood."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @classmethod
    def kinds(cls) -> "dict[str, type[BoundedKVCache]]":
        """This class and those that inherit from it, by the names under which files know them."""
        found = {cls.__name__: cls}
        for kind in cls.__subclasses__():
            found |= kind.kinds()
        return found

    @property
    def compression_ratio(self) -> float:
        """full_seq_bytes / kept_bytes; 1.0 before the first token."""
        return self.full_seq_bytes / self.kept_bytes if self.kept_bytes else 1.0

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_state, (self.state,)

    # What mlx_vlm calls: see `mlx_vlm_protocol`

    def to_batch(self, left_padding: Sequence[int]) -> Self:
        """A batch of sequences that begin as this one, each after as much padding as its entry says."""
        batch: Self = self.merge([copy.copy(self) for _ in left_padding])
        batch.prepare(left_padding=left_padding)
        return batch

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        """What `prefix_cache_restore` takes: the state."""
        return {"state": self.state}

    def prefix_cache_restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where the cache that gave `snapshot` stood, under its method. Raises ValueError for a damaged one."""
        restored = self.from_state(snapshot["state"])
        self.__dict__.clear()
        self.__dict__.update(restored.__dict__)

    def prefix_cache_merge(self, rows: Sequence[Any], prefix_lens: Sequence[int]) -> Self | None:
        """One batch of single sequences; None where one is no bounded cache, or has not seen its prefix's tokens."""
        seen = [row.offset if isinstance(row, BoundedKVCache) else None for row in rows]
        return self.merge(rows) if seen == list(prefix_lens) else None

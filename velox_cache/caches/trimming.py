"""Which tokens can be taken back from a cache, and the taking back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from velox_cache.caches.sequences import Sequences, trimmed
from velox_cache.caches.snapshots import Snapshots
from velox_fn.engine import batch
from velox_fn.engine.eviction import Eviction


def interval_of(method: Eviction) -> int:
    """Tokens from one boundary to the next; 1: rows leave with every call."""
    return int(method.settings.get("interval", 1))


def rollback_of(method: Eviction) -> int:
    """Rows that the method keeps aside, so that as many tokens can be taken back after evictions."""
    return int(method.settings.get("rollback", 0))


def has_evicted(held: Sequences) -> bool:
    """Whether a row of any sequence has left."""
    return any(batch.has_evicted(held.store, offset) for offset in held.offsets)


@dataclass(frozen=True, eq=False)
class Past:
    """How far back a cache of `method` can go."""

    method: Eviction
    snapshots: Snapshots
    can_take_back: int  # tokens, once rows have been evicted

    @classmethod
    def of(cls, method: Eviction, snapshots: int) -> "Past":
        """Of a cache that has seen no token."""
        return cls(method, Snapshots(snapshots), rollback_of(method))

    def of_other_rows(self) -> "Past":
        """Of rows that no snapshot shows, because sequences came, left or changed places, or rows are stored anew."""
        return replace(self, snapshots=Snapshots(self.snapshots.most))

    def before(self, held: Sequences) -> "Past":
        """With `held` kept as a snapshot, where it stands at a boundary."""
        snapshots = self.snapshots.before(held)
        return self if snapshots is self.snapshots else replace(self, snapshots=snapshots)

    def advanced(self, real: Sequence[int]) -> "Past":
        """After a call that took in `real` tokens per sequence."""
        left = min(self.can_take_back + min(real), rollback_of(self.method))
        return self if left == self.can_take_back else replace(self, can_take_back=left)

    def can_trim(self, held: Sequences) -> bool:
        """Whether a trim is exact."""
        static, rollback = self.method.static, rollback_of(self.method)
        if interval_of(self.method) > 1 and self.snapshots.most > 0:
            return True
        if interval_of(self.method) == 1 and (not static or rollback > 0):
            return static
        if held.record is None or has_evicted(held):
            return False
        # Scores that queries have changed cannot be had again from before a boundary.
        span = held.store.span
        return span is None or span.settled == 0 or (static and not span.ragged)

    def back(self, held: Sequences, n_tokens: int) -> tuple[Sequences, "Past"]:
        """`held` as it was `n_tokens` tokens ago, and what can be taken back then. ValueError beyond that."""
        if interval_of(self.method) > 1:
            earlier, snapshots = self.snapshots.back(held, n_tokens, static=self.method.static)
            return earlier, replace(self, snapshots=snapshots)
        left = self.can_take_back
        if has_evicted(held):
            if n_tokens > left:
                raise ValueError(
                    f"cannot take back {n_tokens} tokens: rows have been evicted and {left} can be taken back; "
                    f"install with rollback={n_tokens} or more"
                )
            left -= n_tokens
        earlier = trimmed(held, n_tokens)
        every_row_is_there = not has_evicted(earlier)
        return earlier, replace(self, can_take_back=rollback_of(self.method) if every_row_is_there else left)

"""The last states at boundaries, for taking back tokens beyond one."""

from dataclasses import dataclass, replace

from velox_cache.caches.sequences import Sequences, trimmed
from velox_fn.engine.slots import settled_back


@dataclass(frozen=True, eq=False)
class Snapshots:
    """States as they stood at the last `most` boundaries, before rows left: what `trim` goes back to.

    Records are immutable and share arrays with what followed them until that differs; each holds as many rows as the
    cache does at most.
    """

    most: int = 0
    states: tuple[Sequences, ...] = ()  # oldest first

    def before(self, rows: Sequences) -> "Snapshots":
        """These, with `rows` where it stands at a boundary that the next token passes."""
        span = None if rows.record is None else rows.store.span
        if self.most == 0 or span is None or not span.due:
            return self
        return replace(self, states=(*self.states, rows)[-self.most :])

    def back(self, rows: Sequences, n_tokens: int, *, static: bool) -> tuple[Sequences, "Snapshots"]:
        """`rows` as they were `n_tokens` tokens ago, and the snapshots that are older. `static`: scores are frozen.

        Raises ValueError where that is beyond the last boundary and no snapshot reaches there.
        """
        span = rows.store.span
        if span is None or n_tokens <= min(span.since):
            return trimmed(rows, n_tokens), self
        if static and not span.ragged and min(span.kept) + min(span.since) == max(span.seen):  # every token is there
            offsets = tuple(offset - n_tokens for offset in rows.offsets)
            return replace(rows, offsets=offsets).with_store(settled_back(rows.store, n_tokens)), self
        target = [offset - n_tokens for offset in rows.offset_of_each]
        for i, state in reversed(list(enumerate(self.states))):
            surplus = [seen - wanted for seen, wanted in zip(state.offset_of_each, target, strict=True)]
            since = state.store.span.since if state.store.span is not None else ()
            if len(set(surplus)) == 1 and 0 <= surplus[0] <= min(since, default=-1):
                return trimmed(state, surplus[0]), replace(self, states=self.states[:i])
        raise ValueError(
            f"cannot take back {n_tokens} tokens: {min(span.since)} came since the last boundary, where rows left, "
            f"and none of the {len(self.states)} snapshots of earlier boundaries reaches there; install with more "
            "snapshots, or go on from the prompt"
        )

"""The tokens since the last boundary, in a store from which rows leave at intervals.

Such a store holds the rows kept at the last boundary in its first `settled` columns, and the tokens since then after
them. Where all sequences have seen as many tokens they stand without gaps. Sequences of a ragged batch have boundaries
of their own: there the columns past `settled` are `interval` slots, of which a sequence uses the first `since`. All
counts are known on the host, so that no update waits for the device.
"""

import dataclasses

import mlx.core as mx

from velox_fn.engine.records import record


@record
class Span:
    """Counts of a store that evicts at intervals, one of each per sequence, and the queries since the boundary."""

    interval: int  # tokens from one boundary to the next, at least 2
    settled: int  # columns of the rows kept at the last boundary
    kept: tuple[int, ...]  # of these, the rows of this sequence; what follows them is padding
    since: tuple[int, ...]  # tokens since its last boundary
    seen: tuple[int, ...]  # tokens in all
    ragged: bool = False  # the columns past `settled` are slots
    scale: float | None = None  # of the logits of `queries`; None is 1/sqrt(D)
    queries: tuple[mx.array, ...] = ()
    """Where a method is shown queries, those of the tokens since [B,H_q,interval,D]; and the model's attention sinks
    [B,H_q], where it has them, the same for every sequence."""
    ranks: tuple[mx.array, ...] = ()
    """Where a static method's rows are quantised, the ranks int64 [B,H,interval,1] that the tokens since came with."""

    @property
    def due(self) -> tuple[int, ...]:
        """The sequences that have reached a boundary: rows leave them before their next token."""
        if self.interval not in self.since:
            return ()
        return tuple(b for b, since in enumerate(self.since) if since == self.interval)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Tokens that each sequence had seen at its last boundary."""
        return tuple(seen - since for seen, since in zip(self.seen, self.since, strict=True))

    def taken(self, sequences: tuple[int, ...]) -> "Span":
        """Only these sequences; arrays are left alone."""
        kept, since, seen = (tuple(counts[b] for b in sequences) for counts in (self.kept, self.since, self.seen))
        return dataclasses.replace(self, kept=kept, since=since, seen=seen)


def begun(interval: int, batch: int) -> Span:
    """Before the first token."""
    none = (0,) * batch
    return Span(interval=interval, settled=0, kept=none, since=none, seen=none)

"""The last states at boundaries, for taking back tokens beyond one."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from velox_cache.caches.sequences import Sequences, extracted, merged, trimmed
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.records import arrays
from velox_fn.engine.slots import settled_back

_States = tuple[Sequences, ...]  # oldest first


@dataclass(frozen=True, eq=False)
class Snapshots:
    """States as they stood at the last `most` boundaries, before rows left: what `trim` goes back to.

    Those of a sequence go with it into a batch and out of it: there each has boundaries of its own, and is kept by
    itself. Records are immutable and share arrays with what followed them until that differs; each holds as many rows
    as the sequence does at most.
    """

    most: int = 0
    of_each: tuple[_States, ...] = ()  # for each sequence of a batch; else one entry; (): there are none

    @property
    def states(self) -> _States:
        """All of them."""
        return tuple(itertools.chain.from_iterable(self.of_each))

    def before(self, rows: Sequences) -> "Snapshots":
        """These, with `rows` where they stand at a boundary that the next token passes."""
        span = None if rows.record is None else rows.store.span
        if self.most == 0 or span is None or not span.due:
            return self
        held = list(self._held(rows))
        for at, one in [(b, extracted(rows, b)) for b in span.due] if rows.batched else [(0, rows)]:
            held[at] = (*held[at], one)[-self.most :]
            if rows.batched:
                with contextlib.suppress(ValueError):  # inside a graph transformation, where nothing may be evaluated
                    mx.async_eval(arrays(one.record))  # type: ignore[no-untyped-call]
        return replace(self, of_each=tuple(held))

    def chosen(self, rows: Sequences, indices: Sequence[int]) -> "Snapshots":
        """Those of these sequences of `rows`, in this order."""
        of_each = self._of_sequences(rows)
        return replace(self, of_each=tuple(of_each[index] for index in indices))

    def joined(self, rows: Sequence[Sequences], others: Sequence["Snapshots"]) -> "Snapshots":
        """Of a batch of all sequences of `rows`, whose snapshots are `others`."""
        of_each = [each for held, own in zip(others, rows, strict=True) for each in held._of_sequences(own)]
        return replace(self, of_each=tuple(of_each))

    def back(self, rows: Sequences, n_tokens: int, method: Eviction) -> tuple[Sequences, "Snapshots"]:
        """`rows` as they were `n_tokens` tokens ago, and the snapshots that are older.

        Raises ValueError where that is beyond the last boundary and no snapshot reaches there.
        """
        span = rows.store.span
        if span is None or n_tokens <= min(span.since):
            return trimmed(rows, n_tokens), self
        every_token_is_there = min(span.kept) + min(span.since) == max(span.seen)
        if method.static and not span.ragged and every_token_is_there:
            offsets = tuple(offset - n_tokens for offset in rows.offsets)
            return replace(rows, offsets=offsets).with_store(settled_back(rows.store, n_tokens)), self
        if not rows.batched:
            [states] = self._held(rows)
            earlier, older = _back(rows, states, n_tokens)
            return earlier, replace(self, of_each=(older,))
        each = [_back(extracted(rows, b), states, n_tokens) for b, states in enumerate(self._held(rows))]
        together = replace(merged([one for one, _ in each], method), lengths=rows.lengths, padding=rows.padding)
        return together, replace(self, of_each=tuple(older for _, older in each))

    def _held(self, rows: Sequences) -> tuple[_States, ...]:
        return self.of_each or ((),) * (len(rows.offsets) if rows.batched else 1)

    def _of_sequences(self, rows: Sequences) -> tuple[_States, ...]:
        """The same for each sequence where `rows` are a batch in lockstep, which has one entry for all."""
        n = len(rows.offset_of_each)
        if rows.batched or n == 1:
            return self._held(rows)
        return tuple(tuple(extracted(state, b) for state in self.states) for b in range(n))


def _back(rows: Sequences, states: _States, n_tokens: int) -> tuple[Sequences, _States]:
    """One sequence, or some in lockstep, `n_tokens` tokens ago, and the states that are older."""
    since = _since(rows)
    if n_tokens <= since:
        return trimmed(rows, n_tokens), states
    for i, state in reversed(list(enumerate(states))):
        surplus = n_tokens - (rows.offsets[0] - state.offsets[0])
        if 0 <= surplus <= _since(state):
            return trimmed(state, surplus), states[:i]
    raise ValueError(
        f"cannot take back {n_tokens} tokens: {since} came since the last boundary, where rows left, and none of the "
        f"{len(states)} snapshots of earlier boundaries reaches there; install with more snapshots, or go on from the "
        "prompt"
    )


def _since(rows: Sequences) -> int:
    """Tokens since the last boundary."""
    span = None if rows.record is None else rows.store.span
    return 0 if span is None else min(span.since)

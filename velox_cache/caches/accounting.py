"""What the sequences behind a cache hold: rows and bytes."""

from collections.abc import Iterable

from velox_cache.caches.sequences import Sequences
from velox_fn.engine import eviction
from velox_fn.engine.records import arrays


def rows_kept(held: Sequences, interval: int) -> int:
    """Rows kept for the first sequence, first head."""
    if held.record is None:
        return 0
    n_rows = held.real_rows[0]
    return n_rows if interval > 1 else min(n_rows, held.store.most_kept)


def held_bytes(all_held: Iterable[Sequences]) -> int:
    """Bytes of every array held, preallocated room and landing rows included."""
    return sum(leaf.nbytes for held in all_held if held.record is not None for leaf in arrays(held.record))


def kept_bytes(held: Sequences) -> int:
    """Bytes of the kept rows, and of what the method holds beside them."""
    return 0 if held.record is None else eviction.kept_bytes(held.record)


def full_sequence_bytes(held: Sequences) -> int:
    """Bytes that the rows of all tokens seen would take."""
    if held.record is None:
        return 0
    keys, values, offsets = held.store.keys, held.store.values, held.offsets
    row = keys.shape[1] * (keys.shape[3] * keys.itemsize + values.shape[3] * values.itemsize)
    return row * (sum(offsets) if held.batched else offsets[0] * keys.shape[0])

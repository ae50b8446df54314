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
    """Bytes of every array held, preallocated room, landing rows and what rows share included."""
    held_now = [held for held in all_held if held.record is not None]
    shared = {held.store.widths for held in held_now}
    own = sum(leaf.nbytes for held in held_now for leaf in arrays(held.record))
    return own + sum(one.nbytes for one in shared)


def kept_bytes(held: Sequences) -> int:
    """Bytes of the kept rows, and of what the method holds beside them."""
    return 0 if held.record is None else eviction.kept_bytes(held.record)


def full_sequence_bytes(held: Sequences) -> int:
    """Bytes that the rows of all tokens seen would take as they came, not quantised."""
    if held.record is None:
        return 0
    store, offsets = held.store, held.offsets
    batch, n_kv_heads = store.ranks.shape[:2]
    key_dtype, value_dtype = store.dtypes
    row = n_kv_heads * (store.head_dim * key_dtype.size + store.value_dim * value_dtype.size)
    return row * (sum(offsets) if held.batched else offsets[0] * batch)

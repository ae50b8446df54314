"""The last queries only, for the methods that score by a window of them."""

import dataclasses

import mlx.core as mx

from velox_fn.engine.attention import Observed


def last_queries(observed: Observed, offset: mx.array, window: int, *, padded: bool) -> Observed:
    """`observed` with the last `window` real queries of each sequence left; the others count as padding.

    offset int32 [B]: tokens seen, this block included. padded: some sequence has fewer real queries than the block.
    """
    if not padded:
        return dataclasses.replace(
            observed,
            queries=observed.queries[:, :, :, -window:],
            query_positions=observed.query_positions[:, -window:],
            added=observed.added if observed.added is None else observed.added[:, :, :, -window:],
        )
    positions = observed.query_positions
    positions = mx.where(positions >= (offset - window)[:, None], positions, -1)
    return dataclasses.replace(observed, query_positions=positions)

"""The queries of an attention call, as they meet the rows that a cache has shown it."""

from typing import Any

import mlx.core as mx

from velox_fn.engine.attention import Queries, Reading
from velox_fn.engine.half import one_array
from velox_fn.engine.rows import View
from velox_fn.engine.storage import Storage


def queries_over(
    view: View, widths: Storage, queries: mx.array, keys: Any, values: Any, mask: mx.array | None = None
) -> Queries | None:
    """The queries [B,H_q,S,D'] of a call that was told of the cache whose view this is; None when it read other rows.

    keys, values: what attention read. Those of the view themselves, or arrays that the model made of them, row for row:
    in another dtype, once per query head, or out of latents. mask: numbers that were added to the logits. widths:
    of the view's rows, where they are quantised.
    """
    if keys is view[0] and values is view[1]:
        return queries if mask is None else Reading(queries, widths.read(*view)[0], mask)
    batch, n_kv_heads, n_rows = one_array(view[0]).shape[:3]
    for read in (keys, values):
        if not isinstance(read, mx.array) or read.ndim != 4 or read.shape[1] % n_kv_heads:
            return None
        if (read.shape[0], read.shape[2]) != (batch, n_rows):
            return None
    return Reading(queries, keys, mask)

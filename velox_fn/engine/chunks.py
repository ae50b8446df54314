"""Chunks: rows stay or leave with their neighbours, by the mean of their scores (ChunkKV).

A chunk is `chunk` positions, counted from the first token: those from c * chunk on. Its score is the mean over its rows
that are there and compete. So a chunk is a function of positions alone, whatever has left before and however the tokens
were cut into calls. Rows that stay anyhow (sinks, pinned, recent) count in no mean, and a row that is not finite loses
by itself.

The rest of the selection rule holds: exactly `budget` rows stay. So the last chunk that finds room may lose a part of
its rows, by position, and goes on with the others.

Source: "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference" (arXiv:2502.00299),
algorithm 1.

Differs from the paper:

- The paper keeps as many whole chunks of a prompt as fit, once. Here rows leave at every boundary of an interval.
- Any method scores the rows, where the paper takes SnapKV's window of queries; every head by itself.
- Indices are not reused from layer to layer.
"""

import dataclasses
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction, StateT
from velox_fn.engine.records import replaced


def chunked(method: Eviction[StateT], chunk: int) -> Eviction[StateT]:
    """`method`, whose rows stay or leave in chunks of `chunk` positions; with chunk=1, `method` as it is.

    Args:
        method: what scores and evicts, at intervals.
        chunk: positions of a chunk. The paper's is 10.

    Raises:
        ValueError: chunk is no whole number of at least 1, or the method's rows leave one by one.

    Example:
        >>> from velox_fn import chunked, l2norm
        >>> chunked(l2norm(budget=64, interval=32), 10).settings["chunk"]
        10
    """
    if checks.whole_number("chunk", chunk, 1) == 1:
        return method
    if method.settings.get("interval", 1) == 1:
        raise ValueError(
            f"chunk={chunk} lets neighbours leave together, and with interval=1 rows leave one by one as tokens come; "
            f"give an interval too, such as interval={8 * chunk}"
        )
    if method.settings.get("granularity") == "token":
        raise ValueError(
            f"chunk={chunk} lets neighbours leave together, and granularity='token' evicts after every token, within "
            "an interval too; use granularity='block'"
        )

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> Any:
        state: Any = method.init(batch, n_kv_heads, head_dim, value_dim, dtype)
        return replaced(state, store=replaced(state.store, chunk=int(chunk)))

    return dataclasses.replace(method, init=init, settings={**method.settings, "chunk": int(chunk)})

"""Prefill in one block against prefill in chunks: what is kept, and how long it takes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from velox_fn.engine.eviction import Eviction, kept_positions
from velox_fn.engine.records import arrays


@dataclass(frozen=True)
class ChunkedPrefill:
    """One way to cut a prompt."""

    chunk: int  # tokens per call
    calls: int
    same_rows: bool  # whether the kept set is that of one block
    seconds: float  # best of the repetitions


def prefill_in_chunks(
    method: Eviction, keys: mx.array, values: mx.array, chunks: Sequence[int], *, repeat: int = 3
) -> list[ChunkedPrefill]:
    """Take keys [B,H,N,D] and values [B,H,N,D_v] in at once, then in chunks of each size.

    The first result is that of one block. Only the cache is timed, no model. Raises ValueError for a chunk below 1.
    """
    n_tokens = keys.shape[2]
    results: list[ChunkedPrefill] = []
    reference: mx.array | None = None
    for chunk in (n_tokens, *chunks):
        if chunk < 1:
            raise ValueError(f"a chunk holds at least one token, got {chunk}")
        seconds = float("inf")
        for _ in range(repeat):
            start = time.perf_counter()
            state = method.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
            for at in range(0, n_tokens, chunk):
                part = slice(at, at + chunk)
                state, _ = method.update(state, keys[:, :, part], values[:, :, part])
                mx.eval(arrays(state))
            seconds = min(seconds, time.perf_counter() - start)
        positions = kept_positions(state)
        reference = positions if reference is None else reference
        same = bool(mx.array_equal(positions, reference))
        results.append(ChunkedPrefill(chunk, -(-n_tokens // chunk), same, seconds))
    return results

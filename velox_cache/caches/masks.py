"""Attention masks over kept rows, also of batches whose sequences hold different numbers of tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from velox_cache.caches.padding import padding_first
from velox_cache.caches.sequences import Sequences
from velox_fn.engine.select import rank_positions, victim
from velox_fn.engine.slots import opened, used_columns
from velox_fn.engine.store import Store, competing, overwrites, seen_rows


def mask_of_next(
    rows: Sequences, n_tokens: int, ready: Callable[[Any], Any], *, as_array: bool
) -> mx.array | str | None:
    """The mask for the next tokens over `rows`. ready: gives the record as the first of them finds it.

    None where all may see all, "causal", or a bool array: [B,1,N,n+N] where sequences differ or are padded, and
    [N,n+N] where `as_array` asks for one. Ranks are needed where sequences differ.
    """
    real = rows.real_tokens(n_tokens)
    uneven = rows.ragged or min(real) < n_tokens
    if not uneven and (n_tokens == 1 or not as_array):
        return None if n_tokens == 1 else "causal"
    if rows.record is not None:
        rows = replace(rows, record=ready(rows.record))
    if not uneven:
        return causal_array(rows.kept, n_tokens)
    mask = ragged_mask(None if rows.record is None else rows.store, n_tokens, real)
    return padding_first(mask, rows.padding_first(n_tokens))


def ragged_mask(store: Store | None, n_tokens: int, real: tuple[int, ...]) -> mx.array:
    """Which rows of the next view each query may attend to: bool [B,1,N,n+N].

    bool [B,1,1,n] when a single token takes the landing row.
    store: the rows before the call, None when there are none. real: tokens among the next N of each sequence. Padding
    is masked; a padding query attends to itself, so that no softmax is empty.
    Every head of a sequence has its padding at the same rows, so the first head stands for all.
    """
    steps, valid = mx.arange(n_tokens), mx.array(real, mx.int32)
    causal = steps[:, None] >= steps
    block = causal & ((steps < valid[:, None, None]) | (steps[:, None] == steps))
    if store is None or (store.span is not None and max(store.span.seen) == 0):
        return block[:, None]
    if store.span is not None:
        if n_tokens == 1 and min(real) == 1:
            return used_columns(opened(store), real)[:, None, None]
        kept = used_columns(opened(store))
        kept = mx.broadcast_to(kept[:, None], (kept.shape[0], n_tokens, kept.shape[1]))
        return mx.concatenate([kept, block], axis=-1)[:, None]
    ranks = seen_rows(store, n_tokens).ranks[:, :1]
    shown = rank_positions(ranks[:, 0]) >= 0
    if overwrites(store, n_tokens):
        index = victim(competing(store, ranks, store.recent))[:, 0]
        return mx.put_along_axis(shown, index, mx.array(True), axis=1)[:, None, None]
    kept = mx.broadcast_to(shown[:, None], (shown.shape[0], n_tokens, shown.shape[1]))
    return mx.concatenate([kept, block], axis=-1)[:, None]


def causal_array(n_rows: int, n_tokens: int) -> mx.array:
    """bool [N, n+N]: every kept row, then the block's lower triangle."""
    steps = mx.arange(n_tokens)
    return mx.concatenate([mx.ones((n_tokens, n_rows), mx.bool_), steps[:, None] >= steps], axis=1)

"""Padding on the left, turned to the right and back: methods take in blocks whose real tokens come first."""

from collections.abc import Sequence

import mlx.core as mx


def padding_last(block: mx.array, padding: Sequence[int]) -> mx.array:
    """A block [B,H,S,..] whose sequences begin with as much `padding` each, with it at their ends instead."""
    return _turned(block, padding) if any(padding) else block


def padding_first(block: mx.array, padding: Sequence[int]) -> mx.array:
    """The inverse of `padding_last`, also for a mask [B,1,S,n] of such a block's queries."""
    return _turned(block, [-count for count in padding]) if any(padding) else block


def _turned(block: mx.array, shifts: Sequence[int]) -> mx.array:
    n_tokens = block.shape[2]
    index = (mx.arange(n_tokens) + mx.array(list(shifts))[:, None]) % n_tokens
    block = mx.broadcast_to(block, (max(len(shifts), block.shape[0]), *block.shape[1:]))
    return mx.take_along_axis(block, index[:, None, :, None], axis=2)

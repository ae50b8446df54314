"""A digest of the header and arrays of a packed cache, that tells whether anything in them was changed."""

import hashlib
import math
from collections.abc import Sequence

import mlx.core as mx


def digest(header: str, arrays: Sequence[mx.array]) -> mx.array:
    """uint64 [1 + n arrays], not computed yet: one number for the header, one for the bits of each array.

    Any one or two changed bits of an array change its number, and so does exchanging two of its words; whatever else
    happens to it goes unnoticed once in 2^64. It tells damage from none, and keeps nobody from making another digest.
    Shapes and types are not in it.
    """
    of_header = int.from_bytes(hashlib.sha256(header.encode()).digest()[:8], "little") >> 1  # mlx takes ints of 63 bits
    return mx.stack([mx.array(of_header, mx.uint64), *map(_checksum, arrays)])


def _checksum(array: mx.array) -> mx.array:
    """The sum of (2 i + 1) times word i, mod 2^64, where words have 32 bits, or 8 where the last axis is no multiple.

    Odd weights, all different, in twice the bits of a word: no two changed bits can make up for each other.
    """
    *leading, last = array.shape or (1,)
    matrix = array.reshape(math.prod(leading), last)
    words = mx.view(matrix, mx.uint32 if last * array.itemsize % 4 == 0 else mx.uint8).astype(mx.uint64)
    rows, columns = (mx.arange(n, dtype=mx.uint64) for n in words.shape)
    # The weight of a word splits into a part of its row and a part of its column, so sums alone go over all words.
    of_rows = 2 * columns.size * (rows * words.sum(axis=1)).sum()
    return of_rows + ((2 * columns + 1) * words.sum(axis=0)).sum()

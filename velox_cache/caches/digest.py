"""A digest of the header and arrays of a packed cache, that tells whether anything in them was changed."""

import hashlib
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
    # Odd weights, all different, in twice the bits of a word: no two changed bits can make up for each other.
    words = mx.view(mx.flatten(array), mx.uint32 if array.nbytes % 4 == 0 else mx.uint8).astype(mx.uint64)
    return (words * (2 * mx.arange(words.size, dtype=mx.uint64) + 1)).sum()

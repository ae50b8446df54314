"""Arrays that belong to a method and that all its states share, such as codebooks."""

import hashlib

import mlx.core as mx
import numpy as np


class Constants:
    """Some arrays as one value, which a digest of their numbers tells apart. Making one waits for them.

    In a record it is a static field: `records.arrays` lists none of them, and `records.statics` has the digest.
    """

    def __init__(self, *values: mx.array) -> None:
        self.values = values
        told = hashlib.sha256()
        for array in values:
            told.update(f"{array.dtype}{array.shape}".encode())
            told.update(np.asarray(array.astype(mx.float32)).tobytes())
        self.digest = told.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return self.digest

"""What a way to keep rows must do: everything else moves the arrays that it makes of them."""

from typing import Protocol

import mlx.core as mx

from velox_fn.engine.half import Half


class Storage(Protocol):
    """How a store keeps its rows. A frozen, hashable dataclass: it is a static part of a state.

    What is stored of a row depends on the row alone.
    """

    @property
    def packed(self) -> bool:
        """Whether any of a row is quantised."""
        ...

    @property
    def one_width(self) -> tuple[int, int] | None:
        """(bits, group_size) where keys and values are as mlx_lm's own attention reads them; None elsewhere."""
        ...

    @property
    def n_arrays(self) -> tuple[int, int]:
        """How many arrays keys and values are."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that all rows share."""
        ...

    def dims(self, keys: Half, values: Half) -> tuple[int, int]:
        """D and D_v."""
        ...

    def stored(self, keys: Half, values: Half) -> tuple[Half, Half]:
        """Arriving rows as they are kept. Rows that are quantised already stay as they are."""
        ...

    def read(self, keys: Half, values: Half) -> tuple[mx.array, mx.array]:
        """Rows as arrays [B,H,n,D] and [B,H,n,D_v] of the dtype that they came in."""
        ...

    def empty(self, keys: mx.array, values: mx.array) -> tuple[Half, Half]:
        """No rows, stored so. ValueError where they cannot be."""
        ...

    def logits(self, queries: mx.array, keys: Half) -> mx.array:
        """[B,H,L,n] of queries [B,H,L,D]."""
        ...

    def weighted(self, weights: mx.array, values: Half) -> mx.array:
        """The sums [B,H,L,D_v] of rows by weights [B,H,L,n]."""
        ...

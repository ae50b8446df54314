"""What attention layers and generation ask of a cache."""

from typing import Any, Protocol

import mlx.core as mx


class KVCache(Protocol):
    """The cache of one attention layer as mlx_lm speaks to it: `EvictingKVCache`, and mlx_lm's own `KVCache`.

    For layers and loops of your own that take either.
    """

    @property
    def offset(self) -> int | mx.array:
        """Tokens seen: an int, or int32 [B] for a ragged batch. The position of the next token."""
        ...

    @property
    def state(self) -> Any:
        """The arrays that `mx.eval` computes, and what a file needs to go on."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of every array held."""
        ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in keys [B,H,S,D] and values [B,H,S,D_v]; the keys and values that the block's queries may attend to."""
        ...

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for the next N tokens: None, "causal", or a bool array."""
        ...

    def size(self) -> int:
        """Rows kept."""
        ...

    def empty(self) -> bool:
        """Whether no token was seen."""
        ...

    def is_trimmable(self) -> bool:
        """Whether `trim` is exact."""
        ...

    def trim(self, n: int) -> int:
        """Take back the last n tokens; how many were."""
        ...

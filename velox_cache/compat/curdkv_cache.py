"""The adapter under the name that the project's documents give it."""

import mlx.core as mx

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.compat.config import KVCacheConfig


class CurDKVKVCache(EvictingKVCache):
    """One layer's cache under CurDKV, from a config.

    The incoming keys stand in for queries; `install(model, "curdkv")` makes caches that see the model's own.
    Raises ValueError when the config is of another method.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        if config.method != "curdkv":
            raise ValueError(f"CurDKVKVCache needs method='curdkv', got {config.method!r}")
        super().__init__(config.eviction())

    @property
    def curdkv_kept_bytes(self) -> int:
        """Bytes of the kept rows, keys and values in their dtype; the directions that are tracked do not count."""
        basis: tuple[mx.array, ...] = getattr(self.record, "basis", ())  # none before the first token
        return self.kept_bytes - sum(array.nbytes for array in basis)

    @property
    def compression_ratio(self) -> float:
        """full_seq_bytes / curdkv_kept_bytes; 1.0 before the first token."""
        return self.full_seq_bytes / self.curdkv_kept_bytes if self.curdkv_kept_bytes else 1.0

"""The adapter under the name that the project's documents give it."""

import mlx.core as mx

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.compat.config import KVCacheConfig


class QFiltersKVCache(EvictingKVCache):
    """One layer's cache under Q-Filters, from a config and, when calibrated, the layer's filters float32 [H, D].

    use_metal_kernels: True or False; None, as the config says. Raises ValueError when the config is of another method,
    the filters are not a finite 2-D array, or Metal is required and missing.
    """

    def __init__(
        self, config: KVCacheConfig, filters: mx.array | None = None, use_metal_kernels: bool | None = None
    ) -> None:
        if config.method != "qfilters":
            raise ValueError(f"QFiltersKVCache needs method='qfilters', got {config.method!r}")
        switch = {} if use_metal_kernels is None else {"use_metal_kernels": use_metal_kernels}
        super().__init__(config.eviction(filters=filters, **switch))

    @property
    def qfilters_kept_bytes(self) -> int:
        """Bytes of the kept rows and of the filters (head_dim x 4 bytes per head)."""
        return self.kept_bytes

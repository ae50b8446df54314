"""What mlx_vlm asks of a cache that mlx_lm does not.

- `to_batch(left_padding)`: its batch generator pads prompts on the left, and asks each cache of a model for its batch.
- `prefix_cache_snapshot`, `prefix_cache_restore`, `prefix_cache_merge`: its cache of prefixes (APC) keeps a cache of a
  class that defines the first as a checkpoint, whole, and never cuts or joins its rows.
- `memory_profile`: with what it reckons whether a prefix can be stored.
"""

from typing import Any

from velox_cache.caches import accounting
from velox_cache.caches.sequences import Sequences
from velox_fn.engine.eviction import Eviction


def memory_profile(held: Sequences, method: Eviction) -> Any:
    """mlx_vlm's CacheMemory of a cache: its bytes, and rows that grow up to the budget and no further."""
    from mlx_vlm.models.cache import CacheMemory

    size = accounting.held_bytes((held,))
    if held.record is None:
        return CacheMemory()
    most = method.settings.get("budget", 0) + method.settings.get("interval", 1)
    return CacheMemory(source_bytes=size, bytes_per_token=size / held.store.filled, window_size=most)

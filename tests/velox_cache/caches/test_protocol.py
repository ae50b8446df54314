"""The protocol of a cache names what mlx_lm's own has."""

import pytest
from mlx_lm.models.cache import KVCache

import velox_cache as vc
import velox_fn

NAMES = sorted(name for name in vars(vc.KVCache) if not name.startswith("_"))


@pytest.mark.parametrize("cache", [KVCache(), vc.EvictingKVCache(velox_fn.streaming_llm())], ids=["plain", "evicting"])
def test_caches_have_every_member(cache: vc.KVCache) -> None:
    assert len(NAMES) == 9
    assert [name for name in NAMES if not hasattr(cache, name)] == []

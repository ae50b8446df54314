"""The state of a cache with tiers, beside those of the tiers: which heads each holds, and that they fit together."""

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from velox_cache.caches.digest import digest
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.tier_heads import TierHeads


def pack_header(tiers: Sequence[EvictingKVCache], heads: TierHeads) -> tuple[str, mx.array]:
    """A JSON header of the heads of each tier and the class of its cache, with its digest."""
    header = json.dumps({"heads": heads.of_each, "caches": [type(tier).__name__ for tier in tiers]})
    return header, digest(header, [])


def unpack_header(packed: Sequence[Any]) -> tuple[list[list[int]], list[type[EvictingKVCache]]]:
    """The heads of each tier, and the class of its cache. ValueError where they cannot be read, or were changed."""
    known = EvictingKVCache.kinds()
    try:
        text, own = packed[:2]
        header = json.loads(text)
        heads, kinds = header["heads"], [known[name] for name in header["caches"]]
        whole = bool(mx.array_equal(own, digest(text, []))) and len(packed) == 2 + len(heads) == 2 + len(kinds)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"this is not the state of a Velox KV cache with tiers, or one with caches of a class that is not known "
            f"here ({error}); import what made it, copy the file again, or compute the cache anew from its prompt"
        ) from error
    if not whole:
        raise ValueError("the tiers of this cache do not match their digest: it is damaged, copy it again")
    return heads, kinds  # type: ignore[return-value]


def check_same_tokens(tiers: Sequence[EvictingKVCache], heads: TierHeads) -> None:
    """ValueError unless the tiers saw the same tokens, each with its own heads."""
    rows = [tier.record.store.ranks.shape[:2] for tier in tiers if tier.record is not None]
    expected = [(rows[0][0], len(heads)) for heads in heads.of_each] if rows else []
    offsets = [mx.array(tier.offset).tolist() for tier in tiers]
    if rows != expected or any(offset != offsets[0] for offset in offsets):
        raise ValueError(
            f"the tiers of this cache contradict each other: they saw {offsets} tokens and hold {rows} sequences and "
            f"heads, for heads {heads.of_each}; it is damaged, copy it again"
        )

"""The cache of a layer whose heads have different budgets."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import mlx.core as mx

from velox_cache.caches.bounded import BoundedKVCache
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.own_attention import Mask, TieredRows, TierMasks, mask_together, shown_in_tiers
from velox_cache.caches.tier_heads import TierHeads
from velox_cache.caches.tiered_state import check_same_tokens, pack_header, unpack_header
from velox_fn.engine.half import Half
from velox_fn.engine.pinned import Pinned
from velox_fn.engine.store import Ranges

_Found = TypeVar("_Found")


class TieredKVCache(BoundedKVCache):
    """The KV cache of an attention layer whose heads hold different numbers of rows: a cache for each tier of heads.

    A tier is some heads of the layer with one budget. Its cache is that of a layer with these heads alone, so rows are
    held without padding, and all that a cache can do is done by the tiers' own. Attention is one call for each tier,
    through the query tap: `install` puts it there, and `observe_queries` does for models that run without.
    """

    def __init__(self, tiers: Sequence[EvictingKVCache], heads: Sequence[Sequence[int]]) -> None:
        """heads: the KV heads of each of `tiers`. Raises ValueError unless they are all heads of a layer, each once."""
        self.heads = TierHeads(tuple(map(tuple, heads)))
        self.tiers = tuple(tiers)
        self._view: tuple[TieredRows, TieredRows] | None = None
        if len(self.tiers) != len(self.heads.of_each):
            raise ValueError(f"{len(self.tiers)} caches cannot hold {len(self.heads.of_each)} tiers; give one for each")

    # What attention calls

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TieredRows, TieredRows]:
        """Take in keys [B,H,S,D] and values [B,H,S,D_v]; what this block's queries may attend to, tier by tier.

        Raises ValueError when the block does not fit what is cached, which then stays as it was.
        """
        for name, block in (("keys", keys), ("values", values)):
            if block.ndim != 4 or block.shape[1] != self.heads.n_heads:
                raise ValueError(
                    f"{name} have shape {tuple(block.shape)}, and the tiers of this layer hold {self.heads.n_heads} KV "
                    "heads; the budgets are those of another model"
                )
        self._view = None
        of_tiers = zip(self.tiers, self.heads.split(keys), self.heads.split(values), strict=True)
        self._view = shown_in_tiers([tier.update_and_fetch(k, v) for tier, k, v in of_tiers], self.heads)
        return self._view

    def observe_queries(
        self,
        output: mx.array,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        *,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        """Score the last block by its queries [B,H_q,S,D], tier by tier. See `EvictingKVCache.observe_queries`."""
        if not isinstance(keys, TieredRows) or not isinstance(values, TieredRows):
            return output
        drawing = [None] * len(self.tiers) if sinks is None else self.heads.split(sinks, axis=0)
        of_tiers = zip(self.tiers, self.heads.split(queries), keys, values, drawing, strict=True)
        for tier, own, k, v, drawn in of_tiers:
            output = tier.observe_queries(output, own, k, v, scale, sinks=drawn, **others)
        return output

    def keys_and_values(self) -> tuple[TieredRows, TieredRows]:
        """The last view again. See `EvictingKVCache.keys_and_values`."""
        if self._view is None:
            return shown_in_tiers([tier.keys_and_values() for tier in self.tiers], self.heads)
        return self._view

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask | TierMasks:
        """The mask for the next N tokens: what fits all tiers, or one for each."""
        return mask_together([tier.make_mask(N, return_array, window_size) for tier in self.tiers])

    @property
    def layer_mask(self) -> Callable[..., Mask | TierMasks]:
        """The mask of this layer for its next tokens, where layers have masks of their own. Absent elsewhere."""
        of_tiers = [tier.layer_mask for tier in self.tiers]  # type: ignore[attr-defined]
        return lambda n_tokens, *, as_array: mask_together([mask(n_tokens, as_array=as_array) for mask in of_tiers])

    @property
    def keys(self) -> Half | None:
        """The first tier's, which models in a pipeline tie to what they send. See `EvictingKVCache.keys`."""
        return self.tiers[0].keys

    @keys.setter
    def keys(self, keys: Half) -> None:
        self.tiers[0].keys = keys

    # What is the same in all tiers

    @property
    def offset(self) -> int | mx.array:
        """Tokens seen: an int, or int32 [B] for a merged batch."""
        return self.tiers[0].offset

    @property
    def tokens_seen(self) -> int:
        """Tokens passed to the first sequence of the batch."""
        return self.tiers[0].tokens_seen

    @property
    def interval(self) -> int:
        """Tokens from one boundary, where rows leave, to the next."""
        return self.tiers[0].interval

    def parts(self, n_tokens: int) -> tuple[int, ...]:
        """How the next S tokens must be cut into calls. See `EvictingKVCache.parts`."""
        return self.tiers[0].parts(n_tokens)

    @property
    def pinned(self) -> tuple[Ranges, ...]:
        """What `pin` was given, for each sequence of the batch."""
        return self.tiers[0].pinned

    def empty(self) -> bool:
        return self.tiers[0].empty()

    # What each tier does for its heads

    def pin(self, pinned: Pinned) -> None:
        """Let the rows at these positions never leave. See `EvictingKVCache.pin`."""
        self._each(lambda tier: tier.pin(pinned))

    def is_trimmable(self) -> bool:
        """Whether `trim` is exact in every tier."""
        return all(tier.is_trimmable() for tier in self.tiers)

    def trim(self, n: int) -> int:
        """Take back the last n tokens; how many were. 0, with nothing changed, when that cannot be exact in a tier."""
        before = self.tiers
        taken = min(self._each(lambda tier: tier.trim(n)))
        if not taken:
            self.tiers = before
        return taken

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences of the batch, in this order. Raises ValueError for one that is not there."""
        indices = [int(index) for index in batch_indices]
        self._each(lambda tier: tier.filter(indices))

    def prepare(self, **padding: Sequence[int] | None) -> None:
        """Announce a prefill with padding. See `EvictingKVCache.prepare`."""
        self._each(lambda tier: tier.prepare(**padding))

    def finalize(self) -> None:
        """End of a padded prefill."""
        self._each(lambda tier: tier.finalize())

    def extract(self, idx: int) -> Self:
        """Sequence `idx` as an unbatched cache of its own. Raises ValueError for one that is not there."""
        return self._with([tier.extract(idx) for tier in self.tiers])

    @property
    def merge(self) -> Callable[[Sequence[Any]], Self]:
        """(caches) -> one batched cache with a sequence for each, in order. Absent where the tiers have no batch.

        The function raises ValueError when the caches do not share tiers, method and settings.
        """
        of_tiers = [tier.merge for tier in self.tiers]

        def merged(caches: Sequence[Any]) -> Any:
            self._check_alike(caches)
            return self._with([merge([one.tiers[i] for one in caches]) for i, merge in enumerate(of_tiers)])

        return merged

    def extend(self, other: "TieredKVCache") -> None:
        """Add the sequences of `other` to this batch. Raises ValueError unless they share tiers, method, settings."""
        self._check_alike([other])
        others = iter(other.tiers)
        self._each(lambda tier: tier.extend(next(others)))

    @property
    def to_quantized(self) -> Callable[..., Self]:
        """(group_size=64, bits=4) -> a cache with quantised rows. Absent where they are so already."""
        of_tiers = [tier.to_quantized for tier in self.tiers]

        def quantised(group_size: int = 64, bits: int = 4) -> Any:
            return self._with([of_tier(group_size, bits) for of_tier in of_tiers])

        return quantised

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything needed to go on: a JSON header of the tiers with its digest, then each tier's state."""
        self._view = None
        return (*pack_header(self.tiers, self.heads), *(tier.state for tier in self.tiers))

    @state.setter
    def state(self, packed: Sequence[Any]) -> None:
        heads, kinds = unpack_header(packed)
        if hasattr(self, "tiers"):
            self._check_alike([TieredKVCache(self.tiers, heads)])
            states = iter(packed[2:])
            self._each(lambda tier: setattr(tier, "state", next(states)))
            return
        tiers = [kind.from_state(state) for kind, state in zip(kinds, packed[2:], strict=True)]
        TieredKVCache.__init__(self, tiers, heads)
        check_same_tokens(self.tiers, self.heads)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache that goes on by itself; arrays are shared until they differ."""
        return self._with([copy.copy(tier) for tier in self.tiers])

    # Accounting

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(map(repr, self.tiers))}>"

    def size(self) -> int:
        """Rows kept by the heads that keep most."""
        return max(tier.size() for tier in self.tiers)

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, over all tiers."""
        return sum(tier.nbytes for tier in self.tiers)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept rows, and of what the method holds beside them."""
        return sum(tier.kept_bytes for tier in self.tiers)

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that the rows of all tokens seen would take."""
        return sum(tier.full_seq_bytes for tier in self.tiers)

    def memory_profile(self, token_count: int) -> Any:
        """What mlx_vlm reckons with when it stores prefixes."""
        profiles = [tier.memory_profile(token_count) for tier in self.tiers]
        if self.empty():
            return profiles[0]
        sums = {name: sum(getattr(one, name) for one in profiles) for name in ("source_bytes", "bytes_per_token")}
        return type(profiles[0])(**sums, window_size=max(one.window_size for one in profiles))

    # Parts

    def _with(self, tiers: Sequence[EvictingKVCache]) -> Self:
        """The same heads, held by other caches."""
        cache = type(self).__new__(type(self))
        cache.heads, cache.tiers, cache._view = self.heads, tuple(tiers), None
        return cache

    def _each(self, change: Callable[[EvictingKVCache], _Found]) -> list[_Found]:
        """`change` of every tier, or of none where one refuses."""
        tiers = tuple(copy.copy(tier) for tier in self.tiers)
        found = [change(tier) for tier in tiers]
        self.tiers, self._view = tiers, None
        return found

    def _check_alike(self, caches: Sequence[Any]) -> None:
        for one in caches:
            if not isinstance(one, TieredKVCache) or one.heads != self.heads:
                given = one.heads.of_each if isinstance(one, TieredKVCache) else type(one).__qualname__
                raise ValueError(
                    f"only caches with the same heads in each tier can share a batch or a state, got {given} for "
                    f"{self.heads.of_each}; take caches that one model made after one install()"
                )

"""Rows that a cache shows to attention in a form of their own, and that know how they are read.

A layer that reads another layer's rows (gemma4, iquestloopcoder) gives attention these and no cache. The query tap
calls their `attend` in place of mlx_lm's attention.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from velox_cache.caches.tier_heads import TierHeads
from velox_fn.engine.half import AS_THEY_CAME, Half
from velox_fn.engine.quantised_attention import quantised_attention
from velox_fn.engine.rows import View
from velox_fn.engine.storage import Storage

Mask = mx.array | str | None


class PackedRows(tuple[mx.array, ...]):
    """The arrays that keys or values of a view are stored as, such as (packed, scales, biases), and how they are."""

    widths: Storage = AS_THEY_CAME  # not an argument: tree functions make a tuple of what they have done to its arrays

    def attend(
        self,
        queries: mx.array,
        keys: Half,
        values: Half,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        """Attention over the view that these rows are a half of; mlx_lm's knows one width and no sinks.

        Raises ValueError for any other argument that is not None.
        """
        _check_known(others, "quantised rows", "install without key_bits, value_bits and codebooks")
        return quantised_attention(self.widths, queries, keys, values, scale=scale, mask=mask, sinks=sinks)


class TierMasks(tuple[Mask, ...]):
    """The mask of each tier of a layer."""


class TieredRows(tuple[Half, ...]):
    """Keys, or values, of a view, tier by tier of the layer's heads: each tier has its own number of rows."""

    heads = TierHeads(((0,),))

    def attend(
        self,
        queries: mx.array,
        keys: "TieredRows",
        values: "TieredRows",
        scale: float,
        mask: Mask | TierMasks = None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        """Attention over the view that these rows are a half of: one call for each tier.

        Raises ValueError for any other argument that is not None.
        """
        _check_known(others, "heads with numbers of rows of their own", "give each layer one budget")
        masks = mask if isinstance(mask, TierMasks) else [mask] * len(self)
        drawing = [None] * len(self) if sinks is None else self.heads.split(sinks, axis=0)
        tiers = zip(self.heads.split(queries), keys, values, masks, drawing, strict=True)
        return self.heads.joined([_attended(q, k, v, scale, of_tier, own) for q, k, v, of_tier, own in tiers])


def mask_together(masks: Sequence[Mask]) -> Mask | TierMasks:
    """The masks of a layer's tiers as one: what fits all of them where there is such, or one for each."""
    first = masks[0]
    fits_all = not isinstance(first, mx.array) and all(mask is None or isinstance(mask, str) for mask in masks)
    return first if fits_all and all(mask == first for mask in masks) else TierMasks(masks)


def shown(view: View, widths: Storage) -> View:
    """`view`, with what of it is quantised as `PackedRows`."""
    keys, values = (_packed(half, widths) for half in view)
    return keys, values


def shown_in_tiers(views: list[View], heads: TierHeads) -> tuple[TieredRows, TieredRows]:
    """The views of a layer's tiers as one."""
    keys, values = (TieredRows(halves) for halves in zip(*views, strict=True))
    keys.heads = values.heads = heads
    return keys, values


def _attended(
    queries: mx.array, keys: Half, values: Half, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    for half in (keys, values):
        if isinstance(half, PackedRows):
            return half.attend(queries, keys, values, scale, mask, sinks)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _check_known(others: dict[str, Any], rows: str, remedy: str) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"this model's attention takes {', '.join(map(repr, given))}, which attention over {rows} does not know; "
            f"{remedy}"
        )


def _packed(half: Half, widths: Storage) -> Half:
    if not isinstance(half, tuple):
        return half
    rows = PackedRows(half)
    rows.widths = widths
    return rows

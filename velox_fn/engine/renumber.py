"""Showing survivors to attention without the gaps that evictions left: they stand at offset - n ... offset - 1.

Only the view is turned. Stored rows stay as they came, so nothing drifts however often they are shown.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.rope import RopeSpec, rope_remap_positions, rope_spec
from velox_fn.engine.rows import View, arriving_positions
from velox_fn.engine.store import Store, overwrites, seen_rows, used_rows


def renumbering(
    renumber: bool, rope: RopeSpec | Mapping[str, Any] | None, base: float | None = None
) -> RopeSpec | None:
    """The rotation to renumber with, its base replaced by `base` where given; None when not renumbering.

    Raises ValueError when `rope` is needed and not given, or gives frequencies, which leave no base to replace.
    """
    checks.one_of("renumber", renumber, (False, True))
    if not renumber:
        return None
    if rope is None:
        raise ValueError(
            "renumber=True turns keys and so needs the model's rotary embedding; install and KVCacheBuilder read it "
            "from the model, elsewhere give rope=RopeSpec(dims, base, ...)"
        )
    spec = rope_spec(rope)
    if base is None:
        return spec
    if spec.freqs is not None:
        raise ValueError(
            f"rope_base={base} has nothing to replace: this model's rope gives its frequencies; leave it out"
        )
    return dataclasses.replace(spec, base=base)


def gap_free(keys: mx.array, positions: mx.array, offset: mx.array, rope: RopeSpec) -> mx.array:
    """Keys [B,H,n,D] of rows at int32 positions [B,H,n], as if the last `offset` [B] tokens were these n, in order.

    Padding rows (position -1) turn too; nothing reads them.
    """
    real = positions >= 0
    order = mx.argsort(mx.where(real, positions, 2**31 - 1), axis=-1)
    place = mx.argsort(order, axis=-1).astype(mx.int32)
    first = offset[:, None, None] - real.sum(axis=-1, keepdims=True)
    return rope_remap_positions(keys, positions, first + place, rope)


def gap_free_view(
    before: Store, after: Store, view: View, n_tokens: int, valid: mx.array | None, rope: RopeSpec
) -> View:
    """`view`, of a block of S tokens that took `before` to `after`, with its keys without gaps."""
    keys, values = view
    if valid is None and before.filled == before.seen_by_all <= before.most_kept:
        return view  # every token is there
    if overwrites(before, n_tokens):
        positions = select.rank_positions(used_rows(after).ranks)
    else:
        seen = select.rank_positions(seen_rows(before, n_tokens).ranks)
        block = arriving_positions(before.offset, n_tokens, valid)
        block = mx.broadcast_to(block, (*seen.shape[:2], n_tokens))
        positions = mx.concatenate([seen, block], axis=-1)
    return gap_free(keys, positions, after.offset, rope), values

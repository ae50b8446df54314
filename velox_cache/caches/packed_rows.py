"""Quantised rows as a cache shows them: they know how to be read, for layers that have no cache of their own too."""

from typing import Any

import mlx.core as mx

from velox_fn.engine.half import AS_THEY_CAME, Half
from velox_fn.engine.quantised_attention import quantised_attention
from velox_fn.engine.rows import View
from velox_fn.engine.storage import Storage


class PackedRows(tuple[mx.array, ...]):
    """The arrays that keys or values of a view are stored as, such as (packed, scales, biases), and how they are.

    A layer that reads another layer's rows (gemma4, iquestloopcoder) gives attention this and no cache.
    """

    widths: Storage = AS_THEY_CAME  # not an argument: tree functions make a tuple of what they have done to its arrays

    def attend(
        self,
        queries: mx.array,
        keys: Half,
        values: Half,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        """Attention over the view that these rows are a half of, in place of mlx_lm's, which knows one width and no
        sinks.

        The query tap calls it. Raises ValueError for any other argument that is not None.
        """
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(
                f"this model's attention takes {', '.join(map(repr, given))}, which attention over quantised rows does "
                "not know; install without key_bits, value_bits and codebooks"
            )
        return quantised_attention(self.widths, queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def shown(view: View, widths: Storage) -> View:
    """`view`, with what of it is quantised as `PackedRows`."""
    keys, values = (_packed(half, widths) for half in view)
    return keys, values


def _packed(half: Half, widths: Storage) -> Half:
    if not isinstance(half, tuple):
        return half
    rows = PackedRows(half)
    rows.widths = widths
    return rows

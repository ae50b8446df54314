"""Rows kept quantised: a row is quantised once, when it arrives, and its bits do not change afterwards."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from velox_fn.engine import select, slots
from velox_fn.engine.eviction import Eviction, State, StateT
from velox_fn.engine.half import AS_THEY_CAME, cut, widths_of
from velox_fn.engine.landing import written
from velox_fn.engine.records import replaced
from velox_fn.engine.rows import View
from velox_fn.engine.storage import Storage
from velox_fn.engine.store import Store, quantised_store

NO_WIDTHS: Mapping[str, Any] = MappingProxyType(dataclasses.asdict(AS_THEY_CAME))
"""The settings of rows that stay as they came."""


def quantised(
    method: Eviction[StateT],
    *,
    key_bits: int | None = None,
    value_bits: int | None = None,
    group_size: int = 64,
) -> Eviction[StateT]:
    """`method`, with its rows stored as `mx.quantize` makes them; with neither bits, `method` as it is.

    Which rows stay is told from the rows as they arrive: a static method keeps the very rows that it keeps without. One
    that scores by attention scores the quantised rows, as attention does.

    A view of several tokens holds arrays: the rows before the block, read back, and the block as it came. That of one
    token holds the rows as they are stored, each half one array or (packed, scales, biases); `dequantised` reads them,
    and `velox_fn.attend` attends to them as they are.

    Args:
        method: what evicts.
        key_bits: of each number of a key: 2, 3, 4, 5, 6 or 8. None leaves keys as they come.
        value_bits: of each number of a value likewise.
        group_size: numbers of a row that share a scale: 32, 64 or 128. It must divide the widths of keys and values.

    Raises:
        ValueError: MLX has no such bits or groups, or the method cannot work on quantised rows.

    Example:
        >>> from velox_fn import l2norm, quantised
        >>> quantised(l2norm(budget=64), key_bits=8, value_bits=4).settings["key_bits"]
        8
    """
    widths = widths_of(key_bits, value_bits, group_size)
    if not widths.packed:
        return method
    return stored_as(method, widths, dataclasses.asdict(widths), {})


def stored_as(
    method: Eviction[StateT], widths: Storage, settings: Mapping[str, Any], params: Mapping[str, mx.array]
) -> Eviction[StateT]:
    """`method` with its rows stored so, and with the settings and arrays that say how.

    Raises:
        ValueError: the method cannot work on quantised rows, or stores them some way already.
    """
    _check(method, widths)

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> Any:
        state: Any = method.init(batch, n_kv_heads, head_dim, value_dim, dtype)
        return replaced(state, store=_begun(method, state.store, widths))

    return dataclasses.replace(
        method,
        init=init,
        settings={**method.settings, **settings},
        params={**method.params, **params},
        widths=widths,
    )


def converted(method: Eviction[StateT], state: StateT, widths: Storage) -> StateT:
    """A state of `method` as one whose rows are stored so: its rows are quantised here, and once.

    state: with a rank on each row, as `method.scored` gives it.
    """
    whole: Any = state
    store: Store = whole.store
    if store.warm_up:
        raise ValueError(_NO_FILTERS)
    widths.empty(store.keys, store.values)  # refuses dimensions that groups do not divide
    keys, values = widths.stored(store.keys, store.values)
    after = replaced(store, keys=keys, values=values, widths=widths)
    if store.span is not None and method.arrival is not None:
        after = replaced(after, span=replaced(store.span, ranks=(_ranks_since(method, whole, store),)))
    made: StateT = replaced(whole, store=after)
    return made


def dequantised(state: State, view: View) -> tuple[mx.array, mx.array]:
    """A view of `state`'s method with its keys [B,H,n,D] and values [B,H,n,D_v] as arrays."""
    return state.store.widths.read(*view)


def _ranks_since(method: Eviction, state: Any, store: Store) -> mx.array:
    """The ranks int64 [B,H,interval,1] of the tokens since the boundary, which have none without widths."""
    span = slots.span_of(store)
    n_slots = store.filled - span.settled
    ranks = mx.full((*store.ranks.shape[:2], span.interval, 1), select.PADDING)
    if n_slots == 0:
        return ranks
    at_boundary = replaced(state, store=replaced(store, offset=mx.array(span.boundaries, mx.int32)))
    keys, values = cut(store.keys, span.settled, store.filled), cut(store.values, span.settled, store.filled)
    since = method.arrival(at_boundary, keys, values, mx.array(span.since, mx.int32))  # type: ignore[misc]
    noted: mx.array = written(ranks, since[..., None], 0)
    return noted


def _begun(method: Eviction, store: Store, widths: Storage) -> Store:
    if store.warm_up:
        raise ValueError(_NO_FILTERS)
    begun = quantised_store(store, widths)
    if store.span is None or method.arrival is None:
        return begun
    shape = (*store.ranks.shape[:2], store.span.interval, 1)
    return replaced(begun, span=replaced(store.span, ranks=(mx.full(shape, select.PADDING),)))


def _check(method: Eviction, widths: Storage) -> None:
    if method.widths.packed:
        raise ValueError(
            f"the rows of {method.name} are stored as {method.widths} already, and a row is quantised once; store them "
            "one way only"
        )
    if widths.n_arrays[1] > 1 and method.settings.get("merge"):
        raise ValueError(
            f"merge={method.settings['merge']} adds to stored values, and the bits of a quantised row do not change "
            "after it came; leave value_bits or codebooks out (key_bits alone can stay), or merge"
        )
    if method.shown is not None:
        raise ValueError(
            "renumber=True turns the stored keys anew for every view, which quantised ones do not allow without being "
            "read back as a whole; leave renumber out, or store rows as they come"
        )
    if method.static and method.arrival is None:
        raise ValueError(
            f"{method.name} does not say how it ranks a block as it arrives (`Eviction.arrival`), and cannot once its "
            "rows are quantised; make it with velox_fn.static_eviction, which says so"
        )


_NO_FILTERS = (
    "without filters, their direction is estimated from the first keys once they are stored, and quantised ones would "
    "give another; calibrate the model (`velox calibrate`), or store rows as they come"
)

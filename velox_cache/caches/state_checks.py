"""What must hold between the header and the arrays of a packed cache. ValueError says which does not."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.caches.sequences import Sequences
from velox_cache.caches.span_checks import span_contradiction, spans_alike
from velox_fn.engine import batch
from velox_fn.engine.checks import FLOATS, MOST_TOKENS
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.records import arrays, statics
from velox_fn.engine.select import rank_positions
from velox_fn.engine.store import Store

_SETTLED = ("budget", "n_sink", "recent", "rollback", "pinned", "widths", "chunk")  # what a store takes from its method
_COUNTED = ("filled", "seen_by_all", "warm_up", "unscored")


def require(holds: bool, contradiction: str) -> None:
    """ValueError, which names the contradiction, unless `holds`."""
    if not holds:
        raise ValueError(
            f"this cache contradicts itself: {contradiction}; it is damaged, copy it again or compute it anew from "
            "its prompt"
        )


def check_header(header: Mapping[str, Any]) -> None:
    """The header's fields by themselves: all there, of their types, counts in range."""
    kinds = {"method": str, "settings": dict, "batched": bool, "true_queries": bool}
    kinds |= dict.fromkeys(("params", "offsets", "pinned"), list)
    for name, kind in kinds.items():
        require(isinstance(header.get(name), kind), f"its header has {name}={header.get(name)!r}")
    offsets, lengths, record = header["offsets"], header.get("lengths"), header.get("record")
    require(all(map(_is_count, offsets)), f"its header has offsets={offsets}, which count tokens")
    require(header["batched"] or len(offsets) == 1, f"its header has offsets={offsets} for one sequence")
    counted = isinstance(lengths, list) and len(lengths) == len(offsets) and all(map(_is_count, lengths))
    require(lengths is None or counted, f"its header has lengths={lengths} for offsets={offsets}")
    padding = header.get("padding", [])
    fits = isinstance(padding, list) and len(padding) in (0, len(offsets)) and all(map(_is_count, padding))
    require(fits, f"its header has padding={padding} for offsets={offsets}")
    require(record is not None or not any(offsets), f"its header has offsets={offsets} and no rows")
    require(record is None or isinstance(record, dict), f"its header has record={record!r}")
    require(_is_count(header.get("can_take_back")), f"its header has can_take_back={header.get('can_take_back')!r}")


def check_leaves(leaves: Sequence[mx.array], empty: Any, fields: Mapping[str, Any]) -> None:
    """The arrays and static fields of a record against those that its method begins with."""
    expected = json.loads(json.dumps(statics(empty)))
    rows, here = fields.get("store"), expected.pop("store")
    require({**fields, "store": None} == {**expected, "store": None}, f"its header has {fields}, its method {expected}")
    rows = rows if isinstance(rows, dict) else {}
    require(rows.keys() == here.keys(), f"its header has rows={fields.get('store')!r}")
    require(all(rows[name] == here[name] for name in _SETTLED), f"its header has rows={rows}, its settings {here}")
    counts = all(_is_count(rows[name]) for name in _COUNTED) and all(
        isinstance(rows[name], bool) for name in ("ordered", "metal")
    )
    require(counts, f"its header has rows={rows}")
    require(spans_alike(rows, here), f"its header has span={rows['span']}, its method {here['span']}")
    require(rows["warm_up"] in (0, here["warm_up"]), f"its header has warm_up={rows['warm_up']}")
    begun = arrays(empty)
    require(len(leaves) == len(begun), f"it has {len(leaves)} arrays where its method has {len(begun)}")
    n_halves = len(arrays((empty.store.keys, empty.store.values)))
    n_rows, row_arrays = leaves[0].shape[2], n_halves + 1  # keys, values and ranks
    ranked = n_rows if rows["span"] is None else rows["span"]["settled"]
    for i, (leaf, like) in enumerate(zip(leaves, begun, strict=True)):
        shape = like.shape
        if i < row_arrays:
            shape = (*like.shape[:2], ranked if i == n_halves else n_rows, *like.shape[3:])
        # Values may have another than keys.
        dtypes = FLOATS if i < n_halves and like.dtype in FLOATS else (like.dtype,)
        given = f"{leaf.dtype} {tuple(leaf.shape)}"
        require(
            leaf.shape == shape and leaf.dtype in dtypes, f"it has {given} where its rows need {shape} {dtypes[-1]}"
        )
    beside = [leaf for leaf in leaves[row_arrays + 1 :] if leaf.dtype in FLOATS]
    require(all(mx.isfinite(leaf).all().item() for leaf in beside), "what it holds beside its rows is not finite")


def check_rows(rows: Sequences, method: Eviction, true_queries: bool, can_take_back: int) -> None:
    """The counts that the host knows against the rows themselves."""
    rollback = int(method.settings.get("rollback", 0))
    require(can_take_back <= rollback, f"its header has can_take_back={can_take_back} with rollback={rollback}")
    require(
        not true_queries or method.observation is not None, f"{method.name} takes no queries, its header says it does"
    )
    if rows.record is None:
        return
    store = rows.store
    waiting = f"its header has unscored={store.unscored} of {store.filled} rows"
    require(store.unscored == 0 or (method.static and store.span is None), f"{waiting}, and its method lets none wait")
    seen = [int(offset) for offset in np.array(store.offset)]
    require(list(rows.offset_of_each) == seen, f"its header has offsets={list(rows.offsets)}, its arrays {seen}")
    require(store.seen_by_all == min(seen), f"its header has seen_by_all={store.seen_by_all}, its arrays {seen}")
    if store.span is not None:
        contradiction = span_contradiction(store, seen)
        require(contradiction is None, str(contradiction))
        return
    room = min(store.capacity, store.limit + 1)
    require(store.filled <= room, f"its header has filled={store.filled} where there is room for {room} rows")
    require(store.unscored <= store.filled, waiting)
    whole = store.ordered and store.filled == store.seen_by_all
    require(store.unscored == 0 or whole, "rows have no rank, and some were evicted or are not in order")
    for b, offset in enumerate(seen):
        _check_positions(store, b, offset)


def _check_positions(store: Store, b: int, offset: int) -> None:
    """The rows of one sequence, that has seen `offset` tokens: real ones each once, the rest padding."""
    positions = np.array(rank_positions(store.ranks[b, :, : store.filled - store.unscored]))
    beyond = np.array(rank_positions(store.ranks[b, :, store.filled :]))  # tokens taken back, and room: maybe a copy
    require(
        all(
            (np.isin(rest, used) | (rest < 0) | (rest >= offset)).all()
            for rest, used in zip(beyond, positions, strict=True)
        ),
        f"its header has filled={store.filled}, and more of its rows are tokens",
    )
    n_real = batch.real_rows(store, offset)
    least = store.budget if batch.has_evicted(store, offset) else offset
    require(n_real >= least, f"it has {n_real} rows of {offset} tokens, where it keeps {least}")
    if store.filled > store.limit:  # the landing row is padding in a sequence that the last token was not for
        n_real = min(n_real, max(int((positions >= 0).sum(-1).min()), store.limit))
    n_real -= store.unscored
    in_time = np.sort(positions, axis=-1)
    padding, real = np.split(in_time, [positions.shape[-1] - n_real], axis=-1)
    apart = (np.diff(real, axis=-1) > 0).all() and (real >= 0).all() and (real < offset).all()
    require(
        n_real >= 0 and bool(apart) and bool((padding == -1).all()),
        f"of the rows that it keeps of {offset} tokens some stand twice, or where no token was",
    )
    require(
        not store.ordered or np.array_equal(positions, in_time), "its rows are not in order, its header says they are"
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_TOKENS

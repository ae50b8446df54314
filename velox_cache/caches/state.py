"""A cache as the tuple that mlx_lm saves: a JSON header, then arrays, the last of which is their digest."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.caches.digest import digest
from velox_cache.caches.sequences import Sequences
from velox_cache.caches.span_checks import with_places
from velox_cache.caches.state_checks import check_header, check_leaves, check_rows, require
from velox_cache.known_methods import method_named
from velox_fn.engine.checks import FLOATS
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.pinned import pinned_by_sequence, pinned_ranges
from velox_fn.engine.records import arrays, refilled, statics, with_statics
from velox_fn.engine.store import Ranges

FORMAT_VERSION = 2  # 1: without a digest


def params_digest(method: Eviction) -> str:
    """A fingerprint of the method's parameter arrays, names and shapes included."""
    found = hashlib.sha256()
    for name, array in method.params.items():
        found.update(f"{name}{array.shape}".encode())
        found.update(np.asarray(array.astype(mx.float32)).tobytes())
    return found.hexdigest()[:16]


def same_method(one: Eviction, other: Eviction) -> bool:
    """Whether two caches keep rows by the same rule, so that they may share a batch."""
    if one is other:
        return True
    alike = one.name == other.name and dict(one.settings) == dict(other.settings)
    return alike and params_digest(one) == params_digest(other)


def pack_state(method: Eviction, rows: Sequences, true_queries: bool, can_take_back: int) -> tuple[Any, ...]:
    """Everything needed to go on: header, the method's parameters, the record's arrays once there are rows, digest.

    Waits for nothing: the digest is computed when it is asked for.
    """
    leaves = [*method.params.values(), *([] if rows.record is None else arrays(rows.record))]
    header = json.dumps(
        {
            "format": FORMAT_VERSION,
            "method": method.name,
            "settings": dict(method.settings),
            "params": list(method.params),
            "arrays": [_described(leaf) for leaf in leaves],
            "offsets": rows.offsets,
            "batched": rows.batched,
            "lengths": rows.lengths,
            "padding": rows.padding,
            "pinned": rows.pinned,
            "true_queries": true_queries,
            "can_take_back": can_take_back,
            "record": None if rows.record is None else statics(rows.record),
        }
    )
    return (header, *leaves, digest(header, leaves))


def unpack_state(packed: Sequence[Any]) -> tuple[Eviction, Sequences, bool, int]:
    """The arguments of `pack_state` again. Raises ValueError when `packed` is not what it made."""
    header = _header(packed)
    leaves, own = list(packed[1:-1]), packed[-1]
    _check_digest(packed[0], header, leaves, own)
    check_header(header)
    n_params = len(header["params"])
    method = _method(header, leaves[:n_params])
    rows = Sequences(
        offsets=tuple(header["offsets"]),
        batched=header["batched"],
        lengths=None if header["lengths"] is None else tuple(header["lengths"]),
        padding=tuple(header.get("padding", ())),
        pinned=_pinned(header),
    )
    rows = dataclasses.replace(rows, record=_record(method, header, leaves[n_params:], rows.pinned))
    check_rows(rows, method, header["true_queries"], header["can_take_back"])
    return method, rows, header["true_queries"], header["can_take_back"]


def _described(array: mx.array) -> list[Any]:
    return [str(array.dtype), list(array.shape)]


def _header(packed: Sequence[Any]) -> dict[str, Any]:
    """The header of a packed cache. Raises ValueError when it is not one of ours or of another format."""
    try:
        header = dict(json.loads(packed[0]))
        version = header["format"]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ValueError("this is not the state of a Velox KV cache: it has no header that can be read") from error
    if version == FORMAT_VERSION:
        return header
    if version == 1:
        raise ValueError(
            "this cache has format 1, of an older velox-kv, which has no digest to tell whether it is whole; compute "
            "the cache again from its prompt"
        )
    raise ValueError(f"this cache has format {version}; this velox-kv reads {FORMAT_VERSION}; upgrade velox-kv")


def _check_digest(text: str, header: dict[str, Any], leaves: list[Any], own: Any) -> None:
    """ValueError unless header and arrays are those that the digest was made of. Waits for the arrays."""
    if not all(isinstance(leaf, mx.array) for leaf in (*leaves, own)):
        raise ValueError("this cache lacks arrays that its header names, or holds other things: it is truncated")
    require(
        header.get("arrays") == [_described(leaf) for leaf in leaves],
        f"its arrays are not those of {header.get('method')} here that its header lists",
    )
    made = digest(text, leaves)
    alike = own.dtype == made.dtype and own.shape == made.shape and bool(mx.array_equal(own, made))
    require(alike, "its header and arrays do not match their digest")


def _method(header: dict[str, Any], params: Sequence[mx.array]) -> Eviction:
    """The method that made a packed cache, with its settings and parameters."""
    try:
        return method_named(header["method"]).make(
            **header["settings"], **dict(zip(header["params"], params, strict=True))
        )
    except TypeError as error:
        raise ValueError(
            f"this velox-kv has no {header['method']} with {header['settings']} and {header['params']} ({error}): "
            "another version wrote the cache; use that one, or compute the cache again"
        ) from error


def _pinned(header: dict[str, Any]) -> tuple[Ranges, ...]:
    """What each sequence has pinned."""
    given = header["pinned"]
    try:
        found = tuple(pinned_ranges(ranges) for ranges in given)
    except (TypeError, ValueError):
        found = ()
    require(len(found) == len(given) in (0, len(header["offsets"])), f"its header has pinned={given}")
    return found


def _record(
    method: Eviction, header: dict[str, Any], leaves: Sequence[mx.array], pinned: tuple[Ranges, ...]
) -> Any | None:
    """The method's record, or None for a cache that has seen nothing."""
    fields = header["record"]
    if fields is None:
        require(not leaves, "it has arrays of rows, of which its header says that there are none")
        return None
    widths = method.widths
    n_keys, n_values = widths.n_arrays
    halves = leaves[: n_keys + n_values]
    whole = len(halves) == n_keys + n_values and all(leaf.ndim == 4 for leaf in halves)
    require(whole and any(leaf.dtype in FLOATS for leaf in halves), "it lacks keys and values of four dimensions")
    batch, n_kv_heads = halves[0].shape[:2]
    head_dim, value_dim = widths.dims(halves[0], halves[n_keys])
    dtype = next(leaf.dtype for leaf in halves if leaf.dtype in FLOATS)
    empty = method.init(batch, n_kv_heads, head_dim, value_dim, dtype)
    empty = pinned_by_sequence(empty, pinned * batch if len(pinned) == 1 else pinned)
    empty = with_places(empty, leaves, len(arrays(empty)))
    check_leaves(leaves, empty, fields)
    here = {**fields, "store": {**fields["store"], "metal": empty.store.metal}}  # the machine may be another one
    return with_statics(refilled(empty, list(leaves)), here)

"""A cache as the tuple that mlx_lm saves: a JSON header, then arrays."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.caches.sequences import Sequences
from velox_cache.known_methods import method_named
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.records import arrays, statics, with_arrays, with_statics
from velox_fn.engine.store import Store

FORMAT_VERSION = 1


def params_digest(method: Eviction) -> str:
    """A fingerprint of the method's parameter arrays, names and shapes included."""
    digest = hashlib.sha256()
    for name, array in method.params.items():
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.asarray(array.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]


def same_method(one: Eviction, other: Eviction) -> bool:
    """Whether two caches keep rows by the same rule, so that they may share a batch."""
    if one is other:
        return True
    alike = one.name == other.name and dict(one.settings) == dict(other.settings)
    return alike and params_digest(one) == params_digest(other)


def pack_state(method: Eviction, rows: Sequences, true_queries: bool, can_take_back: int) -> tuple[Any, ...]:
    """Everything needed to go on: header, the method's parameters, and the record's arrays once there are rows."""
    header = {
        "format": FORMAT_VERSION,
        "method": method.name,
        "settings": dict(method.settings),
        "params": list(method.params),
        "digest": params_digest(method),
        "offsets": rows.offsets,
        "batched": rows.batched,
        "lengths": rows.lengths,
        "true_queries": true_queries,
        "can_take_back": can_take_back,
        "record": None if rows.record is None else statics(rows.record),
    }
    leaves = [] if rows.record is None else arrays(rows.record)
    return (json.dumps(header), *method.params.values(), *leaves)


def unpack_state(packed: Sequence[Any]) -> tuple[Eviction, Sequences, bool, int]:
    """The arguments of `pack_state` again. Raises ValueError when `packed` is not what it made."""
    header = _header(packed)
    method = _method(header, packed)
    rows = Sequences(
        record=_record(method, header, packed),
        offsets=tuple(header["offsets"]),
        batched=header["batched"],
        lengths=None if header["lengths"] is None else tuple(header["lengths"]),
    )
    return method, rows, header["true_queries"], header["can_take_back"]


def _header(packed: Sequence[Any]) -> dict[str, Any]:
    """The header of a packed cache. Raises ValueError when it is not one of ours or of a newer format."""
    try:
        header = json.loads(packed[0])
        version = header["format"]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ValueError("this is not the state of a Velox KV cache: it has no header that can be read") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"this cache has format {version}; this velox-kv reads {FORMAT_VERSION}; upgrade velox-kv")
    return dict(header)


def _method(header: dict[str, Any], packed: Sequence[Any]) -> Eviction:
    """The method that made a packed cache, with its settings and parameters."""
    names = header["params"]
    params = dict(zip(names, packed[1 : 1 + len(names)], strict=True))
    method = method_named(header["method"]).make(**header["settings"], **params)
    if params_digest(method) != header["digest"]:
        raise ValueError("the parameters in this cache do not match its header: the file is damaged")
    return method


def _record(method: Eviction, header: dict[str, Any], packed: Sequence[Any]) -> Any | None:
    """The method's record, or None for a cache that has seen nothing."""
    fields = header["record"]
    if fields is None:
        return None
    leaves = list(packed[1 + len(header["params"]) :])
    if len(leaves) < 2 or not all(isinstance(leaf, mx.array) for leaf in leaves):
        raise ValueError("this cache lacks arrays that its header names: the file is truncated")
    keys, values = leaves[0], leaves[1]
    unlike = ValueError(
        f"the arrays in this cache are not those of {header['method']} here: it is damaged, or another version of "
        "velox-kv wrote it; compute the cache again"
    )
    if (keys.ndim, values.ndim) != (4, 4):
        raise unlike
    batch, n_kv_heads, _, head_dim = keys.shape
    empty = method.init(batch, n_kv_heads, head_dim, values.shape[-1], keys.dtype)
    if [leaf.ndim for leaf in leaves] != [leaf.ndim for leaf in arrays(empty)]:
        raise unlike
    _check_counts(header, empty.store, fields["store"], keys)
    here = {**fields, "store": {**fields["store"], "metal": empty.store.metal}}  # the machine may be another one
    return with_statics(with_arrays(empty, leaves), here)


def _check_counts(header: dict[str, Any], empty: Store, fields: dict[str, Any], keys: mx.array) -> None:
    """ValueError when what a header says of its rows cannot be true of these keys, or of the method it names."""
    changed = [name for name in ("budget", "n_sink", "recent", "rollback") if fields[name] != getattr(empty, name)]
    n_sequences = keys.shape[0] if header["batched"] else 1
    if changed or not 0 <= fields["filled"] <= keys.shape[2] or len(header["offsets"]) != n_sequences:
        raise ValueError(
            f"the header of this cache contradicts itself or its arrays: keys {tuple(keys.shape)}, offsets "
            f"{header['offsets']}, rows {fields}, settings {header['settings']}; it is damaged, compute the cache again"
        )

"""The caches that are compared, and blocks of random rows for them."""

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.known_methods import known_methods, method_named
from velox_fn import Eviction, RopeSpec
from velox_fn.methods.fusion import TERMS, term_names
from velox_fn.methods.learned import OF_ROWS

N_SINK = 4
_TOKENS = 64  # that decode steps take in turn


class Cache(Protocol):
    """What a decode step calls."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any: ...


@dataclass(frozen=True)
class Shape:
    """The rows of one layer."""

    batch: int = 1
    n_kv_heads: int = 8
    head_dim: int = 128
    dtype: mx.Dtype = mx.float16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return f"{dtype}, B={self.batch}, H={self.n_kv_heads}, D={self.head_dim}"

    def block(self, n_tokens: int) -> tuple[mx.array, mx.array]:
        """Random keys and values [B,H,S,D], evaluated."""
        size = (self.batch, self.n_kv_heads, n_tokens, self.head_dim)
        keys, values = mx.random.normal(size).astype(self.dtype), mx.random.normal(size).astype(self.dtype)
        mx.eval(keys, values)
        return keys, values

    @property
    def row_bytes(self) -> int:
        """Of one row's key and value in all heads and sequences."""
        return 2 * self.batch * self.n_kv_heads * self.head_dim * self.dtype.size


def method(name: str, shape: Shape, budget: int, **settings: Any) -> Eviction:
    """A registered method, with random parameters where it takes calibrated ones."""
    n_heads, head_dim = shape.n_kv_heads, shape.head_dim
    filters = mx.random.normal((n_heads, head_dim), key=mx.random.key(1))
    moments = mx.ones((n_heads, len(term_names(TERMS))))
    calibrated = {"filters": filters, "mean_keys": filters, "means": moments, "deviations": moments}
    calibrated |= {**dict.fromkeys(OF_ROWS, filters), "score_age": mx.ones((n_heads,))}
    calibrated["query_centres"] = mx.ones((n_heads, 1, 3, head_dim // 2))
    known = method_named(name)
    if known.rope == "always":
        settings = {"rope": RopeSpec(dims=head_dim), **settings}
    taken = {key: value for key, value in calibrated.items() if key in known.calibrated}
    return known.make(budget=budget, **taken, **settings)


def caches(shape: Shape, budget: int, *, static: bool) -> dict[str, Callable[[], Cache]]:
    """Makers of the caches of this size, the rotating one first, then each method of one of the two families."""
    arms: dict[str, Callable[[], Cache]] = {"RotatingKVCache": partial(RotatingKVCache, max_size=budget, keep=N_SINK)}
    for name in known_methods():
        made = method(name, shape, budget)
        if made.static is static:
            arms[name] = partial(EvictingKVCache, made)
    if static:
        recent = budget // 4
        arms[f"qfilters, recent={recent}"] = partial(EvictingKVCache, method("qfilters", shape, budget, recent=recent))
        arms.update(peer_qfilters(shape, budget))
    return arms


def peer_qfilters(shape: Shape, budget: int) -> Mapping[str, Callable[[], Cache]]:
    """Q-Filters as veloxquant-mlx has it, where that is installed (`make bench-peers`); nothing elsewhere."""
    peer = _peer_module("qfilters_cache")
    if peer is None:
        return {}
    config = SimpleNamespace(
        head_dim=shape.head_dim, qfilters_budget=budget, qfilters_n_sink=N_SINK, qfilters_recent=0, seed=0
    )
    filters = mx.random.normal((shape.n_kv_heads, shape.head_dim), key=mx.random.key(1))
    return {"veloxquant-mlx qfilters": lambda: peer.QFiltersKVCache(config, filters=filters)}


def peer_curdkv_step(shape: Shape, budget: int) -> Mapping[str, Callable[[], None]]:
    """A token into veloxquant-mlx's CurDKV cache, full from the start: its prefill is a loop over such steps.

    It stores float16 or bfloat16, and casts float32.
    """
    peer = _peer_module("curdkv_cache")
    if peer is None:
        return {}
    cache = peer.CurDKVKVCache(SimpleNamespace(curdkv_budget=budget, curdkv_n_sink=N_SINK))
    cache.state = shape.block(budget)
    return {"veloxquant-mlx curdkv": _step(cache, shape)}


def _peer_module(name: str) -> Any | None:
    try:
        return importlib.import_module(f"veloxquant_mlx.cache.{name}")
    except ImportError:
        return None


def plain_cache() -> Cache:
    """mlx_lm's unbounded cache."""
    cache: Cache = KVCache()
    return cache


def decode_step(make: Callable[[], Cache], shape: Shape, n_seen: int) -> Callable[[], None]:
    """One token into a cache that has seen `n_seen`; what attention would read is evaluated."""
    cache = make()
    parts = cache.parts(n_seen) if isinstance(cache, EvictingKVCache) else (n_seen,)
    for n_tokens in parts:
        mx.eval(cache.update_and_fetch(*shape.block(n_tokens)))
    return _step(cache, shape)


def _step(cache: Cache, shape: Shape) -> Callable[[], None]:
    # Different ones, in turn: a key that attends to copies of itself leaves the other rows no weight.
    tokens = itertools.cycle([shape.block(1) for _ in range(_TOKENS)])

    def step() -> None:
        mx.eval(cache.update_and_fetch(*next(tokens)))

    return step

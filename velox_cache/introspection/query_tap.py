"""Query tap: hand the queries of every attention call to the cache it was given, and to observers.

An mlx_lm cache sees keys and values, never queries. But almost every mlx_lm model calls
`scaled_dot_product_attention` with its queries (after RoPE, and after q_norm where there is one), with the keys and
values it reads, and with the cache they came from. The tap wraps that function where the model's own modules imported
it, and nothing else: attention itself runs as before, on the same arguments.
"""

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.cache_kinds import is_list

ATTENTION = "scaled_dot_product_attention"

# Guards, between threads, which taps a wrapper serves; attention calls read that without a lock. A thread that holds it
# may come back to it: the collector drops a model, and with it that model's tap, at any moment.
_installing = threading.RLock()


@dataclass(frozen=True, eq=False)
class ObservedAttention:
    """One attention call, after it ran.

    `cache` is the object the model passed along, None when it passed none. `keys` and `values` are what attention
    reads: usually the view that the cache returned, but some models pass others (a quantised cache: tuples). Compare
    them with that view before taking the queries for queries of that cache.
    """

    cache: Any
    queries: mx.array  # [B, H_q, S, D], after RoPE
    keys: Any  # [B, H, n, D]
    values: Any  # [B, H, n, D_v]
    scale: float
    mask: mx.array | str | None
    terms: Mapping[str, Any] = field(
        default_factory=dict
    )  # what else enters the softmax, by name; see `observe_queries`


Observer = Callable[[ObservedAttention], None]


class QueryTap:
    """A tap on the attention of one model, to be installed and removed at will. See `observe_queries`."""

    def __init__(
        self, model: nn.Module, callback: Observer | None = None, *, caches: Iterable[Any] | None = None
    ) -> None:
        self._namespaces = _attention_namespaces(model)
        if not self._namespaces:
            raise ValueError(
                f"the queries of model type {model_type(model)!r} cannot be observed: its modules do not call mlx_lm's "
                f"{ATTENTION}, they compute attention by hand; use a method that needs no queries"
            )
        self._callback = callback
        self._caches = None if caches is None else flat_caches(caches)
        self._joined: list[tuple[dict[str, Any], _TappedAttention]] = []

    def install(self) -> "QueryTap":
        """Start observing. Installing twice is installing once."""
        with _installing:
            if not self._joined:
                for namespace in self._namespaces:
                    tapped = namespace[ATTENTION]
                    if not isinstance(tapped, _TappedAttention):
                        tapped = namespace[ATTENTION] = _TappedAttention(tapped)
                    tapped.admit(self)
                    self._joined.append((namespace, tapped))
                    if namespace[ATTENTION] is tapped.attention:  # the last other tap went just before this one came
                        namespace[ATTENTION] = tapped
        return self

    def remove(self) -> None:
        """Stop observing; the last tap to go puts the original function object back. Removing twice is fine.

        Where someone else has wrapped the function meanwhile, ours stays inside theirs, observing nothing.
        """
        with _installing:
            for namespace, tapped in self._joined:
                tapped.dismiss(self)
                if not tapped.taps and namespace[ATTENTION] is tapped:
                    namespace[ATTENTION] = tapped.attention
            self._joined.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "QueryTap":
        """A tap of its own on the same code, which a copy of the model runs too, installed if this one is."""
        twin = copy.copy(self)
        twin._joined = []
        return twin.install() if self._joined else twin

    def report(self, call: ObservedAttention) -> None:
        """Hand one call to the callback, if it is one of those asked for."""
        if self._callback is None:
            return
        if self._caches is None or any(cache is call.cache for cache in self._caches):
            self._callback(call)


@contextmanager
def observe_queries(
    model: nn.Module, callback: Observer | None = None, *, caches: Iterable[Any] | None = None
) -> Iterator[QueryTap]:
    """Observe the queries of `model`'s attention inside a `with` block.

    Each attention call of the model is reported twice, once it ran: to its cache, when that has a method
    `observe_queries(output, queries, keys, values, scale, **terms)`, whose result (the output, perhaps tied to new
    state with `mx.depends`) takes the output's place; and to `callback`, as an `ObservedAttention`. `terms` are, by
    name, what enters the softmax beside the scaled logits: `sinks` [H_q], learned logits that have no row; a `mask` of
    numbers, which are added to the logits; and whatever argument a model may pass that mlx_lm's own attention does not
    know. Most pass none.

    Keys or values that have a method `attend(queries, keys, values, scale, mask, ...)`, as quantised rows of our caches
    do, do the attention themselves, also in a layer that reads another's rows and passes no cache.
    Models of one architecture share the code that is tapped. `caches`, a prompt cache of this model, limits `callback`
    to the calls made with them (those inside a CacheList count); without it every call of that code is reported, those
    without a cache too. Taps nest, in any order of removal.

    Raises ValueError when the model computes attention some other way (gemma2, olmo, plamo2, ...), and so never would
    report a call.
    """
    tap = QueryTap(model, callback, caches=caches)
    tap.install()
    try:
        yield tap
    finally:
        tap.remove()


def flat_caches(caches: Iterable[Any]) -> list[Any]:
    """The caches of a prompt cache, with those inside a CacheList in its place."""
    found: list[Any] = []
    for cache in caches:
        found.extend(flat_caches(cache.caches) if is_list(cache) else [cache])
    return found


def row_caches(caches: Iterable[Any]) -> list[Any]:
    """The same, with the tiers of a layer in the place of its one cache: each holds rows of its own."""
    return [part for cache in flat_caches(caches) for part in getattr(cache, "tiers", (cache,))]


def model_type(model: nn.Module) -> str:
    """The architecture's name as mlx_lm knows it, or the class name."""
    return str(getattr(model, "model_type", type(model).__name__))


class _TappedAttention:
    """Stands in for a module's attention function and serves the taps on it."""

    def __init__(self, attention: Callable[..., mx.array]) -> None:
        functools.update_wrapper(self, attention)
        self.attention = attention
        self.taps: tuple[QueryTap, ...] = ()
        self._after_scale = tuple(inspect.signature(attention).parameters)[5:]  # names of further arguments

    def admit(self, tap: QueryTap) -> None:
        self._exchange(lambda taps: (*taps, tap))

    def dismiss(self, tap: QueryTap) -> None:
        self._exchange(lambda taps: tuple(other for other in taps if other is not tap))

    def _exchange(self, change: Callable[[tuple[QueryTap, ...]], tuple[QueryTap, ...]]) -> None:
        """Change the taps, anew if the collector has changed them meanwhile: what it removed must not come back."""
        while True:
            before = self.taps
            after = change(before)
            if self.taps is before:
                self.taps = after
                return

    def __call__(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, *rest: Any, **options: Any
    ) -> mx.array:
        # mlx_lm's attention over a quantised cache scales its queries in place; observers get them as they came.
        seen = mx.stop_gradient(queries) if hasattr(cache, "bits") else queries
        taps = self.taps
        attend = next((half.attend for half in (keys, values) if hasattr(half, "attend")), None) if taps else None
        if attend is None:
            output = self.attention(queries, keys, values, cache, scale, *rest, **options)
        else:
            output = attend(queries, keys, values, scale, **dict(zip(self._after_scale, rest, strict=False)), **options)
        if not taps:
            return output
        given = {**dict(zip(self._after_scale, rest, strict=False)), **options}
        mask = given.pop("mask", None)
        terms = {name: value for name, value in given.items() if value is not None}
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            terms["mask"] = mask
        observe = getattr(cache, "observe_queries", None)
        if observe is not None:
            output = observe(output, seen, keys, values, scale, **terms)
        call = ObservedAttention(cache, seen, keys, values, scale, mask, terms)
        for tap in taps:
            tap.report(call)
        return output


def _attention_namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Module namespaces in which the model's classes, or those they inherit from, look the attention function up."""
    found: dict[int, dict[str, Any]] = {}
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        if cls.__module__ in sys.modules:
            namespace = vars(sys.modules[cls.__module__])
        else:  # a model file of the user's own, which mlx_lm loads without registering it
            namespace = getattr(cls.__dict__.get("__call__"), "__globals__", {})
        if ATTENTION in namespace:
            found[id(namespace)] = namespace
    return list(found.values())

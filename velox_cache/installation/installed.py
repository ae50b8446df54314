"""What stands in a model's `make_cache`, and how it answers."""

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import mlx.nn as nn

from velox_cache.caches.bounded import BoundedKVCache
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.tiered import TieredKVCache
from velox_cache.installation.tiers import Tier
from velox_cache.introspection.plan import LayerPlan, make_caches
from velox_cache.introspection.query_tap import QueryTap
from velox_fn.engine import checks


@dataclass(frozen=True, eq=False)
class InstalledCaches:
    """What stands in a model's `make_cache`: each call makes fresh caches.

    It is held by the model and does not hold it in turn: so a model that is dropped is freed by its reference count,
    and its tap is removed.
    """

    model: weakref.ref[nn.Module]
    plan: tuple[LayerPlan, ...]
    methods: Mapping[int, Sequence[Tier]]
    cache_class: type[EvictingKVCache]
    true_queries: bool
    tap: QueryTap | None
    snapshots: int
    before: Callable[[], list[Any]] | None  # a make_cache of the user's own that this one stands in for

    def owning_tap(self) -> "InstalledCaches":
        """The same, whose tap goes when it does: else a model that is dropped would leave its tap in shared code."""
        if self.tap is not None:
            weakref.finalize(self, self.tap.remove)
        return self

    def __call__(self) -> list[Any]:
        model = self.model()
        if model is None:
            raise ReferenceError("the model of this make_cache is gone; keep the model, and call model.make_cache()")
        most = max(tier.method.settings.get("budget", 0) for tiers in self.methods.values() for tier in tiers)
        asked = _max_kv_size_asked_for()
        if asked is not None and asked < most:
            warnings.warn(
                f"max_kv_size={asked} has no effect on a model with evicting caches, which hold up to {most} rows; "
                f"install with budget={asked}, or drop max_kv_size",
                stacklevel=3,
            )
        return make_caches(model, self.plan, self._cache_of)

    def _cache_of(self, layer: int) -> BoundedKVCache:
        tiers = self.methods[layer]
        caches = [
            self.cache_class(tier.method, true_queries=self.true_queries, snapshots=self.snapshots) for tier in tiers
        ]
        return caches[0] if len(caches) == 1 else TieredKVCache(caches, [tier.heads or () for tier in tiers])

    def __deepcopy__(self, memo: dict[int, Any]) -> "InstalledCaches":
        """Inside a copy of the model: that copy's own."""
        twin = memo.get(id(self.model()))
        copied = replace(
            self,
            model=self.model if twin is None else weakref.ref(twin),
            tap=copy.deepcopy(self.tap, memo),
            before=copy.deepcopy(self.before, memo),
        )
        return copied.owning_tap()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model with evicting caches installed cannot be pickled: it would arrive without its query tap; "
            "uninstall(model) first, and install again where it is loaded. Its caches can be pickled"
        )


def _max_kv_size_asked_for() -> int | None:
    """The `max_kv_size` of the call of `make_prompt_cache` that a `make_cache` answers, None without one.

    That function, mlx_lm's and its copies, drops the argument when it calls the model's make_cache. It is imported by
    name in many places, so it is not wrapped: its frame is looked at.
    """
    caller = sys._getframe(2)  # of the frames in between no name is kept: one that names itself is a cycle
    asked = caller.f_locals.get("max_kv_size") if caller.f_code.co_name == "make_prompt_cache" else None
    asked = checks.plain(asked)
    return asked if isinstance(asked, int) else None

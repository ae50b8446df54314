"""Settings of the cache in one flat record, under the names that users of the seeds know."""

from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx

from velox_fn.eviction import Eviction
from velox_fn.registry import method_factory

PREFIXES = {"qfilters": "qfilters_", "curdkv": "curdkv_", "h2o": "h2o_"}
"""The prefix of each method's fields in KVCacheConfig."""


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Which method, and its settings. The fields of other methods than `method` are not looked at.

    Raises ValueError at construction when the method is unknown or its settings cannot work.
    """

    method: str = "qfilters"
    head_dim: int | None = None  # checked against the model when given
    qfilters_budget: int = 512  # most rows kept, sinks and recent ones included
    qfilters_n_sink: int = 4  # leading positions never evicted
    qfilters_recent: int = 0  # trailing positions never evicted; about budget / 4 for open-ended generation
    qfilters_calib_tokens: int = 128  # without filters: keys seen before the fallback's filter freezes
    qfilters_sign: int = 1  # +1: high projections stay; -1: low ones
    curdkv_budget: int = 512  # most rows kept, sinks and recent ones included
    curdkv_n_sink: int = 4  # leading positions never evicted
    curdkv_recent: int = 0  # trailing positions never evicted
    curdkv_rank_cap: int = 16  # leading singular directions that count
    curdkv_granularity: str = "block"  # "token": score and evict token by token, as slow as that is
    curdkv_window: int | None = None  # last queries of a block that count; None: all
    curdkv_mean: bool = False  # rank rows by their score per token since they came, not by its sum
    h2o_budget: int = 512  # most rows kept, sinks and recent ones included
    h2o_n_sink: int = 4  # leading positions never evicted
    h2o_grace: int = 16  # trailing positions never evicted

    def __post_init__(self) -> None:
        self.eviction()

    def eviction(self, **params: mx.array) -> Eviction:
        """The configured method; `params` are its arrays, such as filters."""
        return method_factory(self.method)(**self.settings(), **params)

    def settings(self) -> dict[str, Any]:
        """The arguments of the method's factory that this record holds."""
        method_factory(self.method)
        prefix = PREFIXES[self.method]
        return {
            field.name.removeprefix(prefix): getattr(self, field.name)
            for field in fields(self)
            if field.name.startswith(prefix)
        }

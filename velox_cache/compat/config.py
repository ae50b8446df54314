"""Settings of the cache in one flat record, under the names of the project's two documents."""

from dataclasses import dataclass, fields
from typing import Any

from velox_cache.known_methods import method_named
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.fused_evict import resolve_metal
from velox_fn.engine.rope import RopeSpec
from velox_fn.methods.fusion import COMBINE, TERMS
from velox_fn.registry import ALIASES

PREFIXES = {
    "qfilters": "qfilters_",
    "fusion": "fusion_",
    "curdkv": "curdkv_",
    "h2o": "h2o_",
    "tova": "tova_",
    "snapkv": "snap_",
    "cur": "cur_",
    "l2norm": "knorm_",
    "keydiff": "keydiff_",
    "expected_attention": "expected_",
    "streaming_llm": "stream_",
    "random": "random_",
}
"""The prefix of each method's fields in KVCacheConfig. A method that came later has none, and its own defaults here;
`install` takes the settings of every method."""


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Which method, and its settings. The fields of other methods than `method` are not looked at.

    Raises ValueError at construction when the method is unknown or its settings cannot work.
    """

    method: str = "qfilters"
    head_dim: int | None = None  # checked against the model when given
    use_metal_kernels: bool | None = None  # None: where the method has kernels and they run; True: or an error
    qfilters_budget: int = 512  # most rows kept, sinks and recent ones included
    qfilters_n_sink: int = 4  # leading positions never evicted
    qfilters_recent: int = 0  # trailing positions never evicted; about 3/4 of the budget for open-ended generation
    qfilters_calib_tokens: int = 128  # without filters: keys seen before the fallback's filter freezes
    qfilters_sign: int = 1  # +1: high projections stay; -1: low ones
    fusion_budget: int = 512  # most rows kept, sinks and recent ones included
    fusion_n_sink: int = 4  # leading positions never evicted
    fusion_recent: int = 0  # trailing positions never evicted; a searched calibration has a better share of its own
    fusion_terms: str = TERMS  # the static scores that are fused, joined by +
    fusion_combine: str = COMBINE  # or "max"
    curdkv_budget: int = 512  # most rows kept, sinks and recent ones included
    curdkv_n_sink: int = 4  # leading positions never evicted
    curdkv_recent: int = 0  # trailing positions never evicted
    curdkv_rank_cap: int = 16  # leading singular directions that count
    curdkv_granularity: str = "block"  # "token": score and evict token by token, as slow as that is
    curdkv_window: int | None = None  # last queries of a block that count; None: all
    curdkv_mean: bool = False  # a row's score is its mean over the tokens since it came, not its sum
    curdkv_solver: str = "subspace"  # "eigh": exact directions for single tokens too
    h2o_budget: int = 512  # most rows kept, sinks and recent ones included
    h2o_n_sink: int = 4  # leading positions never evicted
    h2o_grace: int = 16  # trailing positions never evicted
    h2o_renumber: bool = False  # show attention the kept rows without gaps
    h2o_rope_base: float | None = None  # when renumbering, in place of the base of the model's rope
    tova_budget: int = 512
    tova_n_sink: int = 4
    snap_budget: int = 512
    snap_n_sink: int = 4
    snap_obs_window: int = 32  # last queries that vote; their rows are never evicted
    snap_kernel: int = 5  # neighbouring rows that votes are averaged over
    cur_budget: int = 512
    cur_n_sink: int = 4
    cur_recent: int = 0
    cur_combine: str = "product"  # of the norms of key and value; "key", "value", "mean"
    cur_window: int = 16  # tokens that are normalised together
    cur_sketch: int | None = None  # columns of a random sketch whose norms stand in; None: none
    cur_seed: int = 0  # of the sketch
    knorm_budget: int = 512
    knorm_n_sink: int = 4
    knorm_recent: int = 0
    keydiff_budget: int = 512
    keydiff_n_sink: int = 4
    keydiff_recent: int = 0
    expected_budget: int = 512
    expected_n_sink: int = 4
    expected_recent: int = 0
    expected_future: int = 512  # without calibration: positions ahead that RoPE is averaged over
    stream_budget: int = 512
    stream_n_sink: int = 4
    stream_renumber: bool = False  # show attention the kept rows without gaps
    random_budget: int = 512
    random_n_sink: int = 4
    random_recent: int = 0
    random_seed: int = 0

    def __post_init__(self) -> None:
        method = method_named(self.method)
        later: dict[str, Any] = {}  # with the model or its calibration
        if self.settings().get("renumber"):
            later["rope"] = RopeSpec(dims=0)
        if method.calibrated and "use_metal_kernels" in method.defaults:  # some take Metal with calibrated arrays only
            resolve_metal(self.use_metal_kernels)
            later["use_metal_kernels"] = None
        self.eviction(**later)

    def eviction(self, **arguments: Any) -> Eviction:
        """The configured method; `arguments` are what belongs to a layer: its filters, its index, its rope."""
        method = method_named(self.method)
        if "use_metal_kernels" in method.defaults:
            arguments = {"use_metal_kernels": self.use_metal_kernels, **arguments}
        elif self.use_metal_kernels:
            raise ValueError(f"use_metal_kernels=True, but {self.method} has no Metal kernels; leave it at None")
        return method.make(**self.settings(), **arguments)

    def settings(self) -> dict[str, Any]:
        """The arguments of the method's factory that this record holds."""
        method_named(self.method)
        prefix = PREFIXES.get(ALIASES.get(self.method, self.method))
        if prefix is None:
            return {}
        return {
            field.name.removeprefix(prefix): getattr(self, field.name)
            for field in fields(self)
            if field.name.startswith(prefix)
        }

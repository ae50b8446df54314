"""Evicting KV caches for mlx_lm: install one on a model and generate, batch or serve as before."""

from velox_cache.adapter import EvictingKVCache, MissingQueriesError
from velox_cache.builder import KVCacheBuilder
from velox_cache.calibration import calibrate, collect_query_activations, sign_agreement
from velox_cache.config import KVCacheConfig
from velox_cache.install import InstallReport, install, uninstall
from velox_cache.plan import LayerPlan, plan_layers
from velox_cache.qfilters_artifact import (
    QFiltersCalibration,
    import_published_filters,
    load_qfilters,
    save_qfilters,
)
from velox_cache.qfilters_cache import QFiltersKVCache
from velox_cache.query_tap import observe_queries
from velox_fn import average_gqa_filters, compute_qfilters

__all__ = [
    "EvictingKVCache",
    "InstallReport",
    "KVCacheBuilder",
    "KVCacheConfig",
    "LayerPlan",
    "MissingQueriesError",
    "QFiltersCalibration",
    "QFiltersKVCache",
    "average_gqa_filters",
    "calibrate",
    "collect_query_activations",
    "compute_qfilters",
    "import_published_filters",
    "install",
    "load_qfilters",
    "observe_queries",
    "plan_layers",
    "save_qfilters",
    "sign_agreement",
    "uninstall",
]

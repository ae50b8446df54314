"""The public names of velox_cache: what type checkers read, and what `__init__.py` imports on first use."""

from .adapter import EvictingKVCache, MissingQueriesError
from .builder import KVCacheBuilder
from .calibration import calibrate, collect_query_activations, sign_agreement
from .config import KVCacheConfig
from .core import average_gqa_filters, compute_qfilters
from .curdkv_cache import CurDKVKVCache
from .install import InstallReport, install, uninstall
from .plan import LayerPlan, plan_layers
from .prompt_cache import load_prompt_cache, register_with_mlx_lm, save_prompt_cache
from .qfilters_artifact import QFiltersCalibration, import_published_filters, load_qfilters, save_qfilters
from .qfilters_cache import QFiltersKVCache
from .query_tap import observe_queries
from .weight_search import SearchOutcome, search_weights

__all__ = [
    "CurDKVKVCache",
    "EvictingKVCache",
    "InstallReport",
    "KVCacheBuilder",
    "KVCacheConfig",
    "LayerPlan",
    "MissingQueriesError",
    "QFiltersCalibration",
    "QFiltersKVCache",
    "SearchOutcome",
    "average_gqa_filters",
    "calibrate",
    "collect_query_activations",
    "compute_qfilters",
    "import_published_filters",
    "install",
    "load_prompt_cache",
    "load_qfilters",
    "observe_queries",
    "plan_layers",
    "register_with_mlx_lm",
    "save_prompt_cache",
    "save_qfilters",
    "search_weights",
    "sign_agreement",
    "uninstall",
]

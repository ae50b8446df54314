"""The public names of velox_cache: what type checkers read, and what `__init__.py` imports on first use."""

from .caches.evicting import EvictingKVCache
from .caches.held import MissingQueriesError
from .caches.prompt_file import load_prompt_cache, register_with_mlx_lm, save_prompt_cache
from .caches.protocol import KVCache
from .calibration import average_gqa_filters, compute_qfilters
from .calibration.artifact import Calibration, import_published_filters, load_calibration, save_calibration
from .calibration.calibrating import calibrate, collect_query_activations, sign_agreement
from .compat.builder import KVCacheBuilder
from .compat.calibration_names import QFiltersCalibration, load_qfilters, save_qfilters
from .compat.config import KVCacheConfig
from .compat.curdkv_cache import CurDKVKVCache
from .compat.qfilters_cache import QFiltersKVCache
from .compression.compress import compress
from .generation import Generation, generate
from .harness.summary import CacheSummary, LayerSummary, summary
from .installation.budget_makers import (
    calibrated_budgets,
    calibrated_head_budgets,
    pyramid_budgets,
    squeeze_budgets,
)
from .installation.installing import install, uninstall
from .installation.report import InstallReport
from .introspection.plan import LayerPlan, plan_layers
from .introspection.query_tap import observe_queries
from .learning.weight_search import SearchOutcome, search_weights
from .version import __version__

__all__ = [
    "CacheSummary",
    "Calibration",
    "CurDKVKVCache",
    "EvictingKVCache",
    "Generation",
    "InstallReport",
    "KVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "LayerPlan",
    "LayerSummary",
    "MissingQueriesError",
    "QFiltersCalibration",
    "QFiltersKVCache",
    "SearchOutcome",
    "__version__",
    "average_gqa_filters",
    "calibrate",
    "calibrated_budgets",
    "calibrated_head_budgets",
    "collect_query_activations",
    "compress",
    "compute_qfilters",
    "generate",
    "import_published_filters",
    "install",
    "load_calibration",
    "load_prompt_cache",
    "load_qfilters",
    "observe_queries",
    "plan_layers",
    "pyramid_budgets",
    "register_with_mlx_lm",
    "save_calibration",
    "save_prompt_cache",
    "save_qfilters",
    "search_weights",
    "sign_agreement",
    "squeeze_budgets",
    "summary",
    "uninstall",
]

"""Pure, typed functions that bound the KV cache of MLX language models by evicting the rows that matter least."""

from velox_fn.eviction import Eviction, kept_bytes, kept_positions, kv
from velox_fn.fused_evict import fused_evict
from velox_fn.key_svd import estimate_filter_dir
from velox_fn.qfilters import QFiltersState, qfilters, qfilters_init, qfilters_update
from velox_fn.query_gram import (
    average_gqa_filters,
    compute_qfilters,
    query_gram_filters,
    query_gram_init,
    query_gram_merge,
    query_gram_update,
)
from velox_fn.records import arrays, with_arrays
from velox_fn.registry import METHODS

__all__ = [
    "METHODS",
    "Eviction",
    "QFiltersState",
    "arrays",
    "average_gqa_filters",
    "compute_qfilters",
    "estimate_filter_dir",
    "fused_evict",
    "kept_bytes",
    "kept_positions",
    "kv",
    "qfilters",
    "qfilters_init",
    "qfilters_update",
    "query_gram_filters",
    "query_gram_init",
    "query_gram_merge",
    "query_gram_update",
    "with_arrays",
]

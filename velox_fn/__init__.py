"""Pure, typed functions that bound the KV cache of MLX language models by evicting the rows that matter least."""

from velox_fn.cur import cur
from velox_fn.curdkv import CurDKVState, curdkv, curdkv_init, curdkv_step, curdkv_update
from velox_fn.eviction import Eviction, kept_bytes, kept_positions, kv
from velox_fn.expected_attention import expected_attention
from velox_fn.fused_evict import fused_evict
from velox_fn.fusion import fusion
from velox_fn.h2o import h2o
from velox_fn.key_svd import estimate_filter_dir
from velox_fn.keydiff import keydiff
from velox_fn.l2norm import l2norm
from velox_fn.leverage import leverage_scores
from velox_fn.qfilters import QFiltersState, qfilters, qfilters_init, qfilters_update
from velox_fn.query_gram import (
    average_gqa_filters,
    compute_qfilters,
    query_gram_filters,
    query_gram_init,
    query_gram_merge,
    query_gram_moments,
    query_gram_update,
)
from velox_fn.random_eviction import random_eviction
from velox_fn.records import arrays, with_arrays
from velox_fn.registry import METHODS
from velox_fn.rope import RopeSpec, rope_remap_positions
from velox_fn.scorers import SCORERS, StaticScorer
from velox_fn.snapkv import snapkv
from velox_fn.streaming_llm import streaming_llm
from velox_fn.tova import tova

__all__ = [
    "METHODS",
    "SCORERS",
    "CurDKVState",
    "Eviction",
    "QFiltersState",
    "RopeSpec",
    "StaticScorer",
    "arrays",
    "average_gqa_filters",
    "compute_qfilters",
    "cur",
    "curdkv",
    "curdkv_init",
    "curdkv_step",
    "curdkv_update",
    "estimate_filter_dir",
    "expected_attention",
    "fused_evict",
    "fusion",
    "h2o",
    "kept_bytes",
    "kept_positions",
    "keydiff",
    "kv",
    "l2norm",
    "leverage_scores",
    "qfilters",
    "qfilters_init",
    "qfilters_update",
    "query_gram_filters",
    "query_gram_init",
    "query_gram_merge",
    "query_gram_moments",
    "query_gram_update",
    "random_eviction",
    "rope_remap_positions",
    "snapkv",
    "streaming_llm",
    "tova",
    "with_arrays",
]

"""Pure, typed functions that bound the KV cache of MLX language models by evicting the rows that matter least."""

from velox_fn.directions.codebooks import made_codebooks
from velox_fn.directions.key_svd import estimate_filter_dir
from velox_fn.directions.leverage import leverage_scores
from velox_fn.directions.query_gram import (
    average_gqa_filters,
    compute_qfilters,
    query_gram_filters,
    query_gram_init,
    query_gram_merge,
    query_gram_moments,
    query_gram_update,
)
from velox_fn.engine.attention import Observed, Queries, attention_mass, observe_rows
from velox_fn.engine.chunks import chunked
from velox_fn.engine.compiled import compiled
from velox_fn.engine.dynamic import DynamicState, dynamic_eviction, dynamic_init, rescore
from velox_fn.engine.eviction import Eviction, State, kept_bytes, kept_positions, kv
from velox_fn.engine.fused_evict import fused_evict
from velox_fn.engine.handing_over import hand_over
from velox_fn.engine.interval import at_intervals, interval_parts
from velox_fn.engine.merging import merging
from velox_fn.engine.pinned import pinned_state, pinning
from velox_fn.engine.quantised import dequantised, quantised
from velox_fn.engine.quantised_attention import attend
from velox_fn.engine.records import arrays, record, replaced, with_arrays
from velox_fn.engine.rope import RopeSpec, rope_remap_positions
from velox_fn.engine.scorers import SCORERS, StaticScorer
from velox_fn.engine.select import Scores
from velox_fn.engine.static import StaticState, static_eviction
from velox_fn.engine.store import Store, init_store
from velox_fn.engine.vector_quantised import vector_quantised
from velox_fn.method import Method
from velox_fn.methods.cur import cur
from velox_fn.methods.curdkv import CurDKVState, curdkv, curdkv_init, curdkv_step, curdkv_update
from velox_fn.methods.expected_attention import expected_attention
from velox_fn.methods.fusion import fusion
from velox_fn.methods.h2o import h2o
from velox_fn.methods.keydiff import keydiff
from velox_fn.methods.keyformer import keyformer
from velox_fn.methods.l2norm import l2norm
from velox_fn.methods.lagkv import lagkv
from velox_fn.methods.learned import learned
from velox_fn.methods.morphkv import morphkv
from velox_fn.methods.nestedkv import nestedkv
from velox_fn.methods.qfilters import QFiltersState, qfilters, qfilters_init, qfilters_update
from velox_fn.methods.random_eviction import random_eviction
from velox_fn.methods.snapkv import snapkv
from velox_fn.methods.streaming_llm import streaming_llm
from velox_fn.methods.tova import tova
from velox_fn.methods.triattention import triattention
from velox_fn.registry import METHODS, all_methods, register, unregister
from velox_fn.version import __version__

__all__ = [
    "METHODS",
    "SCORERS",
    "CurDKVState",
    "DynamicState",
    "Eviction",
    "Method",
    "Observed",
    "QFiltersState",
    "Queries",
    "RopeSpec",
    "Scores",
    "State",
    "StaticScorer",
    "StaticState",
    "Store",
    "__version__",
    "all_methods",
    "arrays",
    "at_intervals",
    "attend",
    "attention_mass",
    "average_gqa_filters",
    "chunked",
    "compiled",
    "compute_qfilters",
    "cur",
    "curdkv",
    "curdkv_init",
    "curdkv_step",
    "curdkv_update",
    "dequantised",
    "dynamic_eviction",
    "dynamic_init",
    "estimate_filter_dir",
    "expected_attention",
    "fused_evict",
    "fusion",
    "h2o",
    "hand_over",
    "init_store",
    "interval_parts",
    "kept_bytes",
    "kept_positions",
    "keydiff",
    "keyformer",
    "kv",
    "l2norm",
    "lagkv",
    "learned",
    "leverage_scores",
    "made_codebooks",
    "merging",
    "morphkv",
    "nestedkv",
    "observe_rows",
    "pinned_state",
    "pinning",
    "qfilters",
    "qfilters_init",
    "qfilters_update",
    "quantised",
    "query_gram_filters",
    "query_gram_init",
    "query_gram_merge",
    "query_gram_moments",
    "query_gram_update",
    "random_eviction",
    "record",
    "register",
    "replaced",
    "rescore",
    "rope_remap_positions",
    "snapkv",
    "static_eviction",
    "streaming_llm",
    "tova",
    "triattention",
    "unregister",
    "vector_quantised",
    "with_arrays",
]

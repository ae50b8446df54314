"""What could be reached at all with so many rows: choices that look at what no method may see.

`oracle` knows what comes: a row scores by the attention that the full cache's queries will give it, in the continuation
and in all questions, times the size of its value, which is what it adds to the output. `repeat` is KVzip's score
(`compression.repeating`): the most attention that a row gets while the model is asked to repeat the context.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.compression.repeating import repeat_scores
from velox_cache.evaluation.contexts import Context
from velox_cache.harness.shared_prefill import SharedPrefill
from velox_cache.introspection.attention_over import attention_over
from velox_cache.introspection.observed_prefill import LayerQueries, observed_prefill
from velox_cache.introspection.plan import make_caches, plan_layers
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.records import replaced
from velox_fn.engine.static import Params, StaticState, per_row, static_eviction

Scores = Mapping[int, mx.array]
"""By layer, float32 [H,N]: how much each row of the context is worth."""


def oracle(model: nn.Module, tokenizer: TokenizerWrapper, context: Context, rows: SharedPrefill) -> Scores:
    """Attention from all that follows, times the size of the value, summed."""
    total: dict[int, mx.array] = {}
    futures = [context.continuation, *(question.tokens + question.answers[0] for question in context.questions)]
    for tokens in futures:
        for call in _read(model, tokens, rows):
            sizes = mx.linalg.norm(call.values[0, :, : rows.n_tokens].astype(mx.float32), axis=-1)
            found = attention_over(call, mx.arange(rows.n_tokens)).sum(axis=(1, 2)) * sizes
            total[call.layer] = total.get(call.layer, mx.zeros_like(found)) + found
        mx.eval(total)
    return total


def repeat(model: nn.Module, tokenizer: TokenizerWrapper, context: Context, rows: SharedPrefill) -> Scores:
    """The most attention while the context is repeated."""
    return repeat_scores(model, tokenizer, rows.caches, context.tokens)


CEILINGS: Mapping[str, Callable[[nn.Module, TokenizerWrapper, Context, SharedPrefill], Scores]] = MappingProxyType(
    {"oracle": oracle, "repeat": repeat}
)
"""By name."""


def caches_by_scores(model: nn.Module, scores: Scores, *, budget: int, recent: int) -> list[Any]:
    """Fresh caches that keep the rows of the highest scores; every row after the scored ones counts more than any."""
    plan = plan_layers(model)
    missing = [entry.layer for entry in plan if entry.bounded and entry.layer not in scores]
    if missing:
        raise ValueError(f"the query tap did not see the attention of layers {missing}: there is no ceiling for them")
    return make_caches(model, plan, lambda layer: EvictingKVCache(_ceiling(scores[layer], budget, recent)))


def _ceiling(scores: mx.array, budget: int, recent: int) -> Eviction:
    """A static method whose states hold the scores; as a method's params they would have to be [H,D]."""
    method = static_eviction("ceiling", _looked_up, budget=budget, recent=recent)

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> StaticState:
        empty: StaticState = method.init(batch, n_kv_heads, head_dim, value_dim, dtype)
        return replaced(empty, params=(per_row(scores, batch),))

    return dataclasses.replace(method, init=init)


def _read(model: nn.Module, tokens: Sequence[int], rows: SharedPrefill) -> list[LayerQueries]:
    (calls,) = observed_prefill(model, tokens, len(tokens), caches=rows.own_caches())
    return calls


def _looked_up(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> mx.array:
    (scores,) = params  # [B,H,N]
    last = scores.shape[-1] - 1
    index = mx.broadcast_to(mx.minimum(positions, last), keys.shape[:3])
    found = mx.take_along_axis(scores, index, axis=-1)
    later: mx.array = mx.where(positions > last, scores.max(axis=-1, keepdims=True) + 1, found)
    return later

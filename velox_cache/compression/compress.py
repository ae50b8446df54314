"""Cut a filled prompt cache down to a budget, once, for whatever will be asked about its context (KVzip)."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.sequences import Sequences
from velox_cache.caches.state import pack_state
from velox_cache.compression.repeating import CHUNK, Tokenizer, repeat_scores
from velox_cache.introspection.cache_kinds import class_name, is_plain, parts, with_parts
from velox_cache.introspection.plan import plain_caches, plan_layers
from velox_cache.introspection.read_context import read_context
from velox_fn.engine import checks, landing, select
from velox_fn.engine.records import replaced
from velox_fn.engine.rows import Rows, arriving_positions
from velox_fn.methods.streaming_llm import streaming_llm

_LEAST = 1e-37  # a weight that is not 0: its inverse is finite


def compress(
    model: nn.Module,
    tokenizer: Tokenizer,
    context: str | Sequence[int],
    *,
    budget: int,
    caches: Sequence[Any] | None = None,
    n_sink: int = 4,
    chunk: int = CHUNK,
) -> list[Any]:
    """A prompt cache of the `budget` rows of a context that the model needs most to repeat it: KVzip, arXiv:2505.23416.

    The model reads the context a second time, in chunks, each after a request to repeat it. Each head keeps the rows
    that got the most attention then. Nothing is known of what will be asked. Caches that are given stay as they are.
    What comes out can be forked by `copy.deepcopy`, saved, and generated from without anything installed.

    What follows is bounded as well: a new token takes the place of the row of the context that was needed least, and
    once all of the context has left, of the oldest one (`streaming_llm`). So leave room for the questions.

    Args:
        model: reads and repeats.
        tokenizer: the model's.
        context: token ids, or a text for `tokenizer.encode`.
        budget: most rows kept for each KV head, now and later.
        caches: the model's own prompt cache, which has read `context` and nothing else. None: it is read here.
        n_sink: leading tokens that always stay.
        chunk: tokens repeated at a time. Memory grows with it.

    Returns:
        A prompt cache: evicting caches for the layers with full attention, copies of the others.

    Raises:
        ValueError: a count cannot work, the caches are not those of this context, or the model does not allow it.
    """
    budget, n_sink, _ = checks.row_limits(budget, n_sink, recent_name=None)
    chunk = checks.whole_number("chunk", chunk, 1)
    tokens = checks.whole_numbers("context", tokenizer.encode(context) if isinstance(context, str) else context, 0)
    plan = plan_layers(model)
    if caches is None:
        caches = plain_caches(model)
        read_context(model, tokens, caches)
    _check_caches(caches, [entry.layer for entry in plan if entry.bounded], len(plan), len(tokens))
    scores = repeat_scores(model, tokenizer, caches, tokens, n_sink=n_sink, chunk=chunk)
    unseen = [entry.layer for entry in plan if entry.bounded and entry.layer not in scores]
    if unseen:
        raise ValueError(f"the query tap did not see the attention of layers {unseen}: their rows cannot be compared")

    def bounded(layer: int) -> Callable[[Any], Any]:
        return lambda cache: _cut(cache, scores[layer], budget, n_sink) if is_plain(cache) else copy.deepcopy(cache)

    return [
        with_parts(cache, bounded(entry.layer)) if entry.bounded else copy.deepcopy(cache)
        for entry, cache in zip(plan, caches, strict=True)
    ]


def _cut(cache: Any, scores: mx.array, budget: int, n_sink: int) -> EvictingKVCache:
    """The rows of a plain cache that score highest, float32 [H,N], in a cache that goes on by recency."""
    keys, values = (half[..., : cache.offset, :] for half in (cache.keys, cache.values))
    method = streaming_llm(budget=budget, n_sink=n_sink)
    state = method.init(1, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
    n_tokens = keys.shape[2]
    # Below the score of every token to come, which is 0, in the same order.
    negative = -1 / mx.maximum(scores, _LEAST)
    worth = select.Scores(negative[None], unseen=(keys, values))
    ranks = select.arrival_ranks(worth, arriving_positions(state.store.offset, n_tokens, None), state.store.staying)
    landed, _ = landing.land(state.store, Rows(keys=keys, values=values, ranks=ranks), None)
    record = replaced(state, store=landing.settle(landed, n_tokens))
    return EvictingKVCache.from_state(pack_state(method, Sequences(record=record, offsets=(n_tokens,)), False, 0))


def _check_caches(caches: Sequence[Any], bounded: Sequence[int], n_layers: int, n_tokens: int) -> None:
    """ValueError unless these are a model's own caches after so many tokens."""
    if len(caches) != n_layers:
        raise ValueError(f"this model has caches for {n_layers} layers, got {len(caches)}; give its whole prompt cache")
    if not bounded:
        raise ValueError("no layer of this model can be bounded: `velox inspect-model` says why")
    if n_tokens == 0:
        raise ValueError("the context is empty: there is nothing to compress")
    for layer in bounded:
        others = [part for part in parts(caches[layer]) if not is_plain(part)]
        if len(others) == len(parts(caches[layer])):
            raise ValueError(
                f"the cache of layer {layer} is a {class_name(others[0])}, which need not hold every row; fill the "
                "model's own caches: velox_cache.uninstall(model), then make_prompt_cache(model)"
            )
        seen = next(part.offset for part in parts(caches[layer]) if is_plain(part))
        if seen != n_tokens:
            raise ValueError(
                f"the cache of layer {layer} has read {seen} tokens and the context has {n_tokens}; give all that the "
                "cache has read as context, as token ids where a chat template or special tokens came with it"
            )

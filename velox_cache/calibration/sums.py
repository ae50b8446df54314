"""What calibration sums up of each layer, and how the sums of several processes become those of the whole model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.row_worth import row_worth
from velox_cache.calibration.score_sums import ScoreSums, no_score_sums, with_worth
from velox_cache.calibration.statistics import LayerStatistics
from velox_cache.calibration.term_sums import TermSums, no_term_sums, term_moments, with_rows
from velox_cache.distributed.collectives import Group, all_gather_texts, summed
from velox_cache.introspection.observed_prefill import LayerQueries
from velox_cache.introspection.shard import ModelShard
from velox_fn.directions.query_gram import (
    QueryGram,
    average_gqa_filters,
    query_gram_filters,
    query_gram_init,
    query_gram_moments,
    query_gram_update,
)
from velox_fn.engine.records import arrays, with_arrays
from velox_fn.engine.rope import RopeSpec, rope_remap_positions, rotary_pairs
from velox_fn.engine.scorers import unit_keys


@dataclass(frozen=True, eq=False)
class LayerSums:
    """Sums over the tokens of one layer."""

    queries: QueryGram
    unit_keys: mx.array  # [H, D] float64: sum of the keys at unit norm
    terms: TermSums
    scale: float  # of the attention logits
    value_dim: int
    scores: ScoreSums | None = None  # over blocks whose rows have a worth; None: none was looked at
    centres: mx.array | None = None  # [H_q, 3, dims/2] float64, as `pair_sums` has them; None: RoPE is not known

    def arrays(self) -> list[mx.array]:
        """All sums, for those who evaluate them."""
        scores = [] if self.scores is None else arrays(self.scores)
        centres = [] if self.centres is None else [self.centres]
        return [*arrays(self.queries), self.unit_keys, *arrays(self.terms), *scores, *centres]

    def filters(self) -> mx.array:
        """The layer's filters, float32 [H, D]. Raises ValueError as `query_gram_filters` does."""
        return average_gqa_filters(query_gram_filters(self.queries), self.unit_keys.shape[0])

    def statistics(self, filters: mx.array) -> LayerStatistics:
        """The layer's mean keys, query moments, and moments of the static scores, with its filters float32 [H, D]."""
        mean, covariance = query_gram_moments(self.queries, self.unit_keys.shape[0])
        with mx.stream(mx.cpu):
            mean_keys = (self.unit_keys / self.queries.count).astype(mx.float32)
            centres = None
            if self.centres is not None:
                of_heads = self.centres / self.queries.count * self.scale
                centres = of_heads.reshape(len(mean_keys), -1, *of_heads.shape[1:]).astype(mx.float32)
        moments = term_moments(self.terms, self.queries.count, filters, mean_keys)
        of_queries = mean * self.scale, covariance * self.scale**2
        return LayerStatistics(mean_keys, *of_queries, *moments, query_centres=centres)


def no_layer_sums(call: LayerQueries, rope: RopeSpec | None = None) -> LayerSums:
    """The sums over no token of the layer that `call` is of, whose keys turn by `rope`; None: that is not known."""
    n_kv_heads, head_dim = call.keys.shape[1], call.keys.shape[3]
    with mx.stream(mx.cpu):
        return LayerSums(
            queries=query_gram_init(call.queries.shape[1], call.queries.shape[3]),
            unit_keys=mx.zeros((n_kv_heads, head_dim), mx.float64),
            terms=no_term_sums(n_kv_heads, head_dim),
            scale=call.scale,
            value_dim=call.values.shape[3],
            centres=None if rope is None else mx.zeros((call.queries.shape[1], 3, rope.dims // 2), mx.float64),
        )


def with_block(sums: LayerSums | None, call: LayerQueries, rope: RopeSpec | None = None) -> LayerSums:
    """The sums over one more block; None stands for those over none."""
    sums = no_layer_sums(call, rope) if sums is None else sums
    first = call.keys.shape[2] - call.queries.shape[2]  # tokens seen before
    keys, values = call.keys[:, :, first:], call.values[:, :, first:]
    new_keys = unit_keys(keys[0]).sum(axis=1)
    with mx.stream(mx.cpu):
        total = sums.unit_keys + new_keys.astype(mx.float64)
    gram, terms = query_gram_update(sums.queries, call.queries), with_rows(sums.terms, keys, values, first)
    centres = None if sums.centres is None or rope is None else sums.centres + pair_sums(call.queries[0], first, rope)
    return replace(sums, queries=gram, unit_keys=total, terms=terms, centres=centres)


def pair_sums(queries: mx.array, first: int, rope: RopeSpec) -> mx.array:
    """Of queries [H_q,S,D] after RoPE, from position `first` on: for each pair that turns the sums of its two numbers
    before RoPE, and of its length. float64 [H_q,3,dims/2]"""
    at = first + mx.arange(queries.shape[1], dtype=mx.int32)
    before = rope_remap_positions(queries[None].astype(mx.float32), at, mx.array(0), rope)[0]
    real, imaginary = rotary_pairs(before, rope)
    parts = mx.stack([real, imaginary, mx.sqrt(real * real + imaginary * imaginary)], axis=1)
    with mx.stream(mx.cpu):
        return parts.astype(mx.float64).sum(2)


def with_scores(sums: LayerSums, call: LayerQueries, *, held_out: bool) -> LayerSums:
    """The sums with what the rows of one more block were worth."""
    worth = row_worth(call)
    if worth is None:
        return sums
    n_kv_heads, head_dim, value_dim = worth.keys.shape[0], worth.keys.shape[2], worth.values.shape[2]
    so_far = sums.scores or no_score_sums(n_kv_heads, head_dim, value_dim)
    return replace(sums, scores=with_worth(so_far, worth, held_out=held_out))


def whole_model_sums(
    own: Mapping[int, LayerSums], layout: Sequence[str], model: nn.Module, shard: ModelShard, group: Group
) -> tuple[dict[int, LayerSums], tuple[str, ...]]:
    """The sums, and the names of the caches, of the whole model, the same on every rank of `group`; collective.

    own: this rank's, by index in its own prompt cache, whose caches are named in `layout`. Each rank puts what it has
    in the whole model's place and zeros elsewhere, and all are added: ranks that ran different texts through the same
    model, ranks that ran the same texts through different layers or heads, and ranks that ran nothing.

    Raises ValueError when the ranks' models differ.
    """
    first = shard.first_layer
    told = {
        "layout": {first + layer: name for layer, name in enumerate(layout)},
        "shapes": {first + layer: _whole_shape(sums, model, shard) for layer, sums in own.items()},
        "scored": {first + layer: True for layer, sums in own.items() if sums.scores is not None},
    }
    everyone = [json.loads(text) for text in all_gather_texts(json.dumps(told), group)]
    names = _agreed(everyone, "layout")
    scored = _agreed(everyone, "scored")
    by_layer = {
        layer: _summed_layer(own.get(layer - first), shape, shard, group, layer in scored)
        for layer, shape in _agreed(everyone, "shapes").items()
    }
    return by_layer, tuple(names[layer] for layer in sorted(names))


def _whole_shape(sums: LayerSums, model: nn.Module, shard: ModelShard) -> list[Any]:
    """Query heads, KV heads, width, scale, width of values, and pairs that turn (0: not known) of a layer of the whole
    model."""
    n_query_heads, head_dim = sums.queries.total.shape
    n_kv_heads = shard.whole_kv_heads(model, sums.unit_keys.shape[0])
    n_pairs = 0 if sums.centres is None else sums.centres.shape[2]
    return [n_query_heads * shard.head_parts, n_kv_heads, head_dim, sums.scale, sums.value_dim, n_pairs]


def _agreed(everyone: Sequence[Mapping[str, Any]], what: str) -> dict[int, Any]:
    agreed: dict[int, Any] = {}
    for told in everyone:
        for key, value in told[what].items():
            if agreed.setdefault(int(key), value) != value:
                raise ValueError(
                    f"layer {key} is {agreed[int(key)]} on one rank and {value} on another, so they cannot calibrate "
                    "together; give every rank the same model"
                )
    return dict(sorted(agreed.items()))


def _summed_layer(
    own: LayerSums | None, shape: Sequence[Any], shard: ModelShard, group: Group, scored: bool
) -> LayerSums:
    n_query_heads, n_kv_heads, head_dim, scale, value_dim, n_pairs = shape
    with mx.stream(mx.cpu):
        gram = mx.zeros((n_query_heads, head_dim, head_dim), mx.float64)
        total = mx.zeros((n_query_heads, head_dim), mx.float64)
        count = mx.zeros((), mx.float64)
        terms = no_term_sums(n_kv_heads, head_dim)
        scores = no_score_sums(n_kv_heads, head_dim, value_dim) if scored else None
        centres = mx.zeros((n_query_heads, 3, n_pairs), mx.float64) if n_pairs else None
        by_kv_head = [mx.zeros((n_kv_heads, head_dim), mx.float64), *arrays(terms), *(arrays(scores) if scores else ())]
        if own is not None:
            query_heads, kv_heads = shard.heads(n_query_heads), shard.heads(n_kv_heads)
            gram[query_heads], total[query_heads] = own.queries.gram, own.queries.total
            if centres is not None and own.centres is not None:
                centres[query_heads] = own.centres
            if shard.head_part * n_kv_heads % shard.head_parts == 0:  # of ranks with the same KV head, the first
                # One rank may have had blocks too short to score: then it has no sums of scores.
                for whole, part in zip(by_kv_head, own.arrays()[len(arrays(own.queries)) :], strict=False):
                    whole[kv_heads] = part
            if shard.head_part == 0:  # ranks with other heads saw the same tokens
                count = own.queries.count
    gram, total, count, keys, *others = (summed(array, group) for array in (gram, total, count, *by_kv_head))
    n_terms = len(arrays(terms))
    return LayerSums(
        queries=QueryGram(gram=gram, total=total, count=count),
        unit_keys=keys,
        terms=with_arrays(terms, others[:n_terms]),
        scale=scale,
        value_dim=value_dim,
        scores=with_arrays(scores, others[n_terms:]) if scores else None,
        centres=None if centres is None else summed(centres, group),
    )

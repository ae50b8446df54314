"""What each head loses when its rows are cut down to a share of a context. Budgets per layer follow from it.

A loss is the squared error of what a KV head adds to the residual stream, for queries that come after the context, when
the rows of the context are those that a method keeps: the error of attention's output, through the layer's own output
projection, relative to the mean square of what it is added to. So losses of layers add up. All sums merge by addition:
over blocks, texts and processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.default_recent import recent_share, with_default_recent
from velox_cache.calibration.head_projections import head_grams
from velox_cache.calibration.layers_with_losses import paired
from velox_cache.calibration.method_arrays import calibrated_params
from velox_cache.calibration.passages import Passage
from velox_cache.introspection.attention_outputs import AttentionOutput, attention_outputs
from velox_cache.introspection.observed_prefill import LayerQueries, forked_caches, observed_prefill, viewed_caches
from velox_cache.introspection.shard import ModelShard
from velox_fn.engine.eviction import Eviction, kept_positions
from velox_fn.engine.widening import widened
from velox_fn.method import Method
from velox_fn.registry import method_named

METHODS = ("fusion", "learned", "qfilters")
"""Whose losses are measured: those that score a row once, by what calibration knows."""
SHARES = (1 / 32, 3 / 64, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
_STRIDE = 2  # one query of so many is looked at


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over the blocks of later tokens of one layer, float64 (on the CPU stream: GPUs have none)."""

    losses: mx.array  # [H, methods, SHARES]: of each block, relative to what attention is added to
    count: mx.array  # []: blocks

    def mean(self) -> mx.array | None:
        """Float32 [H, methods, SHARES]; None where nothing was seen."""
        count = float(np.array(self.count))
        return mx.array((np.array(self.losses) / count).astype(np.float32)) if count else None


def no_loss_sums(n_kv_heads: int, n_methods: int) -> LossSums:
    """The sums over no block."""
    with mx.stream(mx.cpu):
        return LossSums(mx.zeros((n_kv_heads, n_methods, len(SHARES)), mx.float64), mx.zeros((), mx.float64))


def measured_losses(
    model: nn.Module,
    passages: Sequence[Passage],
    calibration: Calibration,
    methods: Sequence[str],
    shard: ModelShard,
    told: Callable[[str, int], object] = lambda doing, n_layers: None,
) -> dict[int, LossSums]:
    """The sums of this process's layers and heads, by index in its prompt cache.

    The model reads the context of each passage, and after it, apart, what comes next and what is copied. calibration:
    the whole model's. told: of what is being done, and of each layer that is done in one of the two. Layers are left
    out whose softmax has terms other than attention sinks, and those whose projection is not found.
    """
    found: dict[int, LossSums] = {}
    grams: dict[int, mx.array] = {}  # by id of the projection
    for passage in passages:
        n_context, caches, kept = len(passage.context), viewed_caches(model), dict[int, mx.array]()
        for _ in observed_prefill(model, passage.context, caches=caches):
            told("measuring losses", 0)
        for later in (passage.next, passage.copied):
            caches_of_later = forked_caches(caches)
            with attention_outputs(model, caches_of_later) as outputs:
                [block] = observed_prefill(model, later, len(later), caches=caches_of_later)
            mx.eval([output.squares for of_layer in outputs.values() for output in of_layer])  # ranks run in step
            for call, output in paired(block, outputs):
                if call.layer not in kept:
                    kept[call.layer] = _kept(call, n_context, calibration, methods, shard)
                key = id(output.projection)
                if key not in grams:
                    grams[key] = head_grams(output, call.keys.shape[1], shard)
                losses = _errors(call, output, kept[call.layer], grams[key]) / _unit(output)
                found[call.layer] = _with(found.get(call.layer), losses, len(methods))
                told("measuring losses", 1)
    return found


def _unit(output: AttentionOutput) -> mx.array:
    """The sum of squares of one token's residual stream, where a norm after attention is taken for a factor."""
    returned, added, before = output.squares
    return before * output.width * returned / mx.maximum(added, 1e-30)


def _with(sums: LossSums | None, losses: mx.array, n_methods: int) -> LossSums:
    sums = sums or no_loss_sums(len(losses), n_methods)
    with mx.stream(mx.cpu):
        more = losses.astype(mx.float64).reshape(sums.losses.shape)
        added = LossSums(sums.losses + more, sums.count + mx.array(1, mx.float64))
    mx.eval(added.losses, added.count)
    return added


def _kept(
    call: LayerQueries, n_context: int, calibration: Calibration, methods: Sequence[str], shard: ModelShard
) -> mx.array:
    """Whether each head keeps each row of the context, bool [methods SHARES, H, n_context]."""
    keys, values = call.keys[:, :, :n_context], call.values[:, :, :n_context]
    found = []
    for name in methods:
        method = method_named(name)
        whole = calibrated_params(method, calibration, shard.first_layer + call.layer)
        arrays = {argument: array[shard.heads(array.shape[0])] for argument, array in whole.items()}
        share = recent_share(method, {}, calibration)
        for part in SHARES:
            budget = int(part * n_context)
            found.append(_kept_by(_made(method, budget, share, arrays), keys, values))
    return mx.stack(found)


def _made(method: Method, budget: int, share: float, arrays: Mapping[str, mx.array]) -> Eviction:
    return method.make(**with_default_recent(method, {"budget": budget, **arrays}, share))


def _kept_by(method: Eviction, keys: mx.array, values: mx.array) -> mx.array:
    """Bool [H,n] of keys [1,H,n,D] and values [1,H,n,D_v]."""
    _, n_kv_heads, n_rows, head_dim = keys.shape
    state = method.init(1, n_kv_heads, head_dim, values.shape[3], keys.dtype)
    state, _ = method.update(state, keys, values)
    at = kept_positions(state)[0]
    return mx.put_along_axis(mx.zeros((n_kv_heads, n_rows), mx.bool_), at, mx.array(True), axis=1)


def _errors(call: LayerQueries, output: AttentionOutput, kept: mx.array, grams: mx.array) -> mx.array:
    """Squared errors [H, n], per query, of what KV heads put out through their part of the projection, for each of n
    choices of rows. grams: as `head_grams` gives them. A gate is taken for a factor of each head, query by query.
    """
    keys, values = widened(call.keys[0]), widened(call.values[0])
    n_kv_heads, n_rows = keys.shape[:2]
    queries = widened(call.queries[0][:, ::_STRIDE]) * call.scale
    n_queries = queries.shape[1]
    n_seen = n_rows - call.queries.shape[2] + mx.arange(0, call.queries.shape[2], _STRIDE)
    grouped = queries.reshape(n_kv_heads, -1, *queries.shape[1:])  # [H,G,q,D]
    logits = grouped @ keys[:, None].swapaxes(-1, -2)
    logits = mx.where(n_seen[:, None] >= mx.arange(n_rows), logits, -mx.inf)
    most = logits.max(-1, keepdims=True)
    sinks = call.terms.get("sinks")
    beside = mx.zeros_like(most)
    if sinks is not None:
        beside = mx.broadcast_to(sinks.astype(mx.float32).reshape(n_kv_heads, -1, 1, 1), most.shape)
        most = mx.maximum(most, beside)
        beside = mx.exp(beside - most)
    weights = mx.exp(logits - most).reshape(n_kv_heads, -1, n_rows)
    beside = beside.reshape(n_kv_heads, -1, 1)

    def outputs(read: mx.array) -> mx.array:
        """[H, G q, D_v]"""
        return (read @ values) / mx.maximum(read.sum(-1, keepdims=True) + beside, 1e-30)

    full = outputs(weights)
    given = widened(output.given[0][::_STRIDE]).reshape(n_queries, n_kv_heads, -1, values.shape[2])
    given = given.transpose(1, 2, 0, 3).reshape(full.shape)
    gate = mx.sqrt(mx.square(given).sum(-1) / mx.maximum(mx.square(full).sum(-1), 1e-30))
    n_later = n_rows - kept.shape[2]
    errors = []
    for choice in kept:
        shown = mx.concatenate([choice, mx.ones((n_kv_heads, n_later), mx.bool_)], axis=1)
        error = (outputs(weights * shown[:, None]) - full) * gate[..., None]
        error = (
            error.reshape(n_kv_heads, -1, n_queries, values.shape[2]).swapaxes(1, 2).reshape(n_kv_heads, n_queries, -1)
        )
        errors.append(((error @ grams) * error).sum((1, 2)) / n_queries)
    return mx.stack(errors, axis=1)

"""What each head loses when its rows are cut down to a share of a context. Budgets per layer follow from it.

A loss is the squared error of attention's output for queries that come after the context, when the rows of the context
are those that a method keeps. It is in units of the residual stream: relative to the layer's whole output, times the
mean square of what attention adds over that of what it is added to. So losses of layers add up. All sums merge by
addition: over blocks, texts and processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.default_recent import recent_share, with_default_recent
from velox_cache.calibration.method_arrays import calibrated_params
from velox_cache.introspection.layer_changes import attention_sizes
from velox_cache.introspection.observed_prefill import LayerQueries, observed_prefill, viewed_caches
from velox_cache.introspection.shard import ModelShard
from velox_fn.engine.eviction import Eviction, kept_positions
from velox_fn.engine.widening import widened
from velox_fn.method import Method
from velox_fn.registry import method_named

METHODS = ("fusion", "learned", "qfilters")
"""Whose losses are measured: those that score a row once, by what calibration knows."""
SHARES = (1 / 32, 3 / 64, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
N_CONTEXT = 1024
LEAST_CONTEXT = 256  # of which the smallest share is a few rows
N_LATER = 128  # tokens read after the context; then as many of its first half are read once more, a far copy
_STRIDE = 2  # one query of so many is looked at


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over the queries of one layer, float64 (on the CPU stream: GPUs have none)."""

    errors: mx.array  # [H, methods, SHARES]: squared errors of the outputs, summed over the query heads of a group
    outputs: mx.array  # [H]: squares of the outputs
    sizes: mx.array  # [2]: mean squares of what attention adds, and of what it is added to

    def losses(self) -> mx.array | None:
        """Float32 [H, methods, SHARES]; None where nothing was seen."""
        added, before = np.array(self.sizes)
        outputs = np.array(self.outputs).sum()
        if not (outputs > 0 and before > 0):
            return None
        return mx.array((np.array(self.errors) / outputs * added / before).astype(np.float32))


def no_loss_sums(n_kv_heads: int, n_methods: int) -> LossSums:
    """The sums over no query."""
    with mx.stream(mx.cpu):
        shape = (n_kv_heads, n_methods, len(SHARES))
        return LossSums(mx.zeros(shape, mx.float64), mx.zeros((n_kv_heads,), mx.float64), mx.zeros((2,), mx.float64))


def measured_losses(
    model: nn.Module, tokens: Sequence[int], calibration: Calibration, methods: Sequence[str], shard: ModelShard
) -> dict[int, LossSums]:
    """The sums of this process's layers and heads, by index in its prompt cache.

    The model reads a context of up to N_CONTEXT of the tokens, the N_LATER tokens after it, and N_LATER of the context
    once more. calibration: the whole model's. Layers whose softmax has terms other than attention sinks are left out.
    """
    n_context = context_length(tokens)
    context, copied = tokens[:n_context], tokens[n_context // 3 :][:N_LATER]
    caches, kept = viewed_caches(model), dict[int, mx.array]()
    for _ in observed_prefill(model, context, caches=caches):
        pass
    found: dict[int, LossSums] = {}
    with attention_sizes(model, caches) as sizes:
        for block in observed_prefill(model, [*tokens[n_context:][:N_LATER], *copied], N_LATER, caches=caches):
            for call in block:
                if call.terms.keys() - {"sinks"}:
                    continue
                if call.layer not in kept:
                    kept[call.layer] = _kept(call, n_context, calibration, methods, shard)
                sums = found.get(call.layer) or no_loss_sums(call.keys.shape[1], len(methods))
                errors, outputs = _errors(call, kept[call.layer])
                with mx.stream(mx.cpu):
                    found[call.layer] = LossSums(
                        sums.errors + errors.astype(mx.float64).reshape(sums.errors.shape),
                        sums.outputs + outputs.astype(mx.float64),
                        sums.sizes,
                    )
                mx.eval(found[call.layer].errors, found[call.layer].outputs)
            mx.eval(list(sizes.values()))  # now: ranks of a model run in step
    with mx.stream(mx.cpu):
        return {
            layer: LossSums(sums.errors, sums.outputs, sizes[layer].astype(mx.float64))
            for layer, sums in found.items()
            if layer in sizes
        }


def context_length(tokens: Sequence[int]) -> int:
    """Tokens of the context in a sequence; below LEAST_CONTEXT where it is too short."""
    return min(N_CONTEXT, len(tokens) - N_LATER)


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


def _errors(call: LayerQueries, kept: mx.array) -> tuple[mx.array, mx.array]:
    """Squared errors [H, n] of the outputs for each of n choices of rows, and the squares of the outputs [H]."""
    keys, values = widened(call.keys[0]), widened(call.values[0])
    n_kv_heads, n_rows = keys.shape[:2]
    queries = widened(call.queries[0][:, ::_STRIDE]) * call.scale
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
        return (read @ values) / mx.maximum(read.sum(-1, keepdims=True) + beside, 1e-30)

    full = outputs(weights)
    n_later = n_rows - kept.shape[2]
    errors = []
    for choice in kept:
        shown = mx.concatenate([choice, mx.ones((n_kv_heads, n_later), mx.bool_)], axis=1)
        errors.append(mx.square(outputs(weights * shown[:, None]) - full).sum((1, 2)))
    return mx.stack(errors, axis=1), mx.square(full).sum((1, 2))

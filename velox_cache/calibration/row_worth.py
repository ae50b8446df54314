"""What the rows of a block turned out to be worth: the target of the learned score.

It is seen while calibration runs its text, without another pass: the mean attention that later queries of the block
give to a row once it is older than a recent window, weighted by how far it moves the output, |v - o|, as a logarithm.
"""

from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from velox_cache.introspection.observed_prefill import LayerQueries
from velox_fn.engine.widening import widened

N_SINK = 4  # rows left out: every method keeps them, and their attention is of another kind
WINDOW = 32  # tokens after which a row is no longer recent
MOST_QUERIES = 128
"""Of a block, evenly spread, that are looked at: their mean is near that of all, and costs as much less."""
AGES = (16, 23, 32, 45, 64, 91, 128, 181, 256)
"""Where the ages end and begin for which attention is averaged. Older ones are too few in a block of 512 tokens."""

_LEAST = 1e-12  # attention that counts as none


@dataclass(frozen=True, eq=False)
class RowWorth:
    """The rows of one block in one layer that have a worth, and the attention that rows receive by their age."""

    keys: mx.array  # float32 [H, n, D]
    values: mx.array  # float32 [H, n, D_v]
    worth: mx.array  # float32 [H, n], log
    by_age: mx.array  # float32 [H, len(AGES) - 1]: attention summed over pairs of a query and a row of such an age
    n_pairs: mx.array  # float32 [H, len(AGES) - 1]


def row_worth(call: LayerQueries) -> RowWorth | None:
    """The worth of a block's rows to the block's own queries; None where the block is too short to have any.

    The queries attend to all that came before them, so a row competes as it does in the whole text. Holds the attention
    weights [H_q, MOST_QUERIES, n] of one layer, a few times.
    """
    n_queries, n_rows = call.queries.shape[2], call.keys.shape[2]
    first, window = n_rows - n_queries, min(WINDOW, n_queries // 4)
    stride = -(-n_queries // MOST_QUERIES)
    own = slice(max(N_SINK, first), n_rows - window - max(window, stride))  # those after it see few queries when old
    if own.stop <= own.start:
        return None
    looked_at = mx.arange(0, n_queries, stride)
    weights, moved = _attention(call, looked_at, own)

    age = (first + looked_at)[:, None] - mx.arange(own.start, own.stop)
    old = age >= window
    settled = looked_at[:, None] >= n_queries // 2  # softmaxes over many rows, so that ages are compared alone
    of_age = mx.stack([(settled & (age >= a) & (age < b)).astype(mx.float32) for a, b in pairwise(AGES)])
    by_query = weights.mean(1).reshape(len(weights), 1, -1)
    return RowWorth(
        keys=widened(call.keys[0, :, own]),
        values=widened(call.values[0, :, own]),
        worth=mx.log((moved.mean(1) * old).sum(1) / old.sum(0) + _LEAST),
        by_age=(by_query @ of_age.reshape(len(of_age), -1).T)[:, 0],
        n_pairs=mx.broadcast_to(of_age.sum((1, 2)), (len(weights), len(of_age))),
    )


def _attention(call: LayerQueries, looked_at: mx.array, own: slice) -> tuple[mx.array, mx.array]:
    """Causal attention weights [H,G,q,n] of these queries to their own block's rows, and the same times |v - o|, the
    distance from the output to the row's value."""
    keys, values = widened(call.keys[0]), widened(call.values[0])
    n_heads, n_rows = keys.shape[:2]
    queries = widened(call.queries[0][:, looked_at]) * call.scale
    grouped = queries.reshape(n_heads, -1, *queries.shape[1:])  # [H,G,q,D]
    shape = grouped.shape[:3]
    at = n_rows - call.queries.shape[2] + looked_at
    causal = at[:, None] >= mx.arange(n_rows)
    logits = (grouped.reshape(n_heads, -1, keys.shape[-1]) @ keys.swapaxes(1, 2)).reshape(*shape, n_rows)
    logits = mx.where(causal, logits, -mx.inf)
    sinks = call.terms.get("sinks")
    if sinks is None:
        weights = mx.softmax(logits, axis=-1)
    else:
        beside = mx.broadcast_to(sinks.astype(mx.float32).reshape(*shape[:2], 1, 1), (*shape, 1))
        weights = mx.softmax(mx.concatenate([logits, beside], axis=-1), axis=-1)[..., :-1]
    outputs = weights.reshape(n_heads, -1, n_rows) @ values  # [H,G q,D_v]
    weights, values = weights[..., own], values[:, own]
    products = (outputs @ values.swapaxes(1, 2)).reshape(weights.shape)
    sizes = mx.square(outputs).sum(-1).reshape(*shape, 1), mx.square(values).sum(-1)[:, None, None]
    return weights, weights * mx.sqrt(mx.maximum(sizes[0] + sizes[1] - 2 * products, 0))

"""What each row of a text turned out to be worth: the targets of the learned score.

A text runs through the model followed by a request to repeat it and itself again, in one block. Of each row of the
text, two things are seen. *Natural*: the attention that queries of the text give it once it is older than a recent
window. *Repeated*: the largest attention while the text is repeated, when every row is wanted again (KVzip's measure).
Both weight attention by how far it moves the output, |v - o|, and are taken as logarithms.
"""

from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from velox_cache.calibration.score_choice import TARGETS
from velox_cache.introspection.observed_prefill import LayerQueries
from velox_fn.engine.widening import widened

N_SINK = 4  # rows left out: every method keeps them, and their attention is of another kind
WINDOW = 32  # tokens after which a row is no longer recent
AGES = (16, 23, 32, 45, 64, 91, 128, 181, 256)
"""Where the ages end and begin for which attention is averaged. Older ones are too few in a text of 400 tokens."""

_LEAST = 1e-12  # attention that counts as none


@dataclass(frozen=True, eq=False)
class RowWorth:
    """The rows of one text in one layer that have a worth, and the attention that rows receive by their age."""

    keys: mx.array  # float32 [H, n, D]
    values: mx.array  # float32 [H, n, D_v]
    worth: mx.array  # float32 [H, n, len(TARGETS)], log
    by_age: mx.array  # float32 [H, len(AGES) - 1]: attention summed over pairs of a query and a row of such an age
    n_pairs: mx.array  # float32 [H, len(AGES) - 1]


def row_worth(call: LayerQueries, n_text: int) -> RowWorth:
    """The worth of the rows of a text of `n_text` tokens, from the call that ran it, a request, and it again.

    Holds the attention weights of one KV head at a time.
    """
    n_tokens = call.keys.shape[2]
    window = min(WINDOW, n_text // 4)
    rows = slice(N_SINK, n_text - 2 * window)  # those after it see few queries when they are old
    steps = mx.arange(n_tokens)
    age = steps[:n_text, None] - steps[None, :n_text]
    old = (age >= window)[:, rows]
    settled = (steps[:n_text, None] >= n_text // 2) & (steps[None, :n_text] >= N_SINK)  # softmaxes over many rows
    of_age = mx.stack([(settled & (age >= a) & (age < b)).astype(mx.float32) for a, b in pairwise(AGES)])
    worth, by_age = [], []
    for queries, keys, values, sinks in _heads(call):
        weights, moved = _attention(queries * call.scale, keys, values, sinks)
        natural = (moved[:, :n_text, rows] * old).mean(0).sum(0) / old.sum(0)
        repeated = moved[:, n_tokens - n_text :, rows].max((0, 1))
        seen = {"natural": natural, "repeated": repeated}
        worth.append(mx.log(mx.stack([seen[name] for name in TARGETS], axis=-1) + _LEAST))
        by_age.append((weights[:, :n_text, :n_text].mean(0) * of_age).sum((1, 2)))
        mx.eval(worth[-1], by_age[-1])
    n_heads = len(worth)
    return RowWorth(
        keys=widened(call.keys[0, :, rows]),
        values=widened(call.values[0, :, rows]),
        worth=mx.stack(worth),
        by_age=mx.stack(by_age),
        n_pairs=mx.broadcast_to(of_age.sum((1, 2)), (n_heads, len(of_age))),
    )


def _heads(call: LayerQueries) -> list[tuple[mx.array, mx.array, mx.array, mx.array | None]]:
    """Of each KV head the queries [G,T,D] of its group, keys [T,D], values [T,D_v], and attention sinks [G] or None."""
    keys, values = widened(call.keys[0]), widened(call.values[0])
    n_heads = keys.shape[0]
    grouped = widened(call.queries[0]).reshape(n_heads, -1, *call.queries.shape[2:])
    sinks = call.terms.get("sinks")
    of_heads = [None] * n_heads if sinks is None else list(sinks.astype(mx.float32).reshape(n_heads, -1))
    return list(zip(grouped, keys, values, of_heads, strict=True))


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Causal attention weights [G,T,T], and the same times |v - o|, the distance from the output to the row's value."""
    n_tokens = keys.shape[0]
    causal = mx.tril(mx.ones((n_tokens, n_tokens), mx.bool_))
    logits = mx.where(causal, queries @ keys.T, -mx.inf)
    if sinks is None:
        weights = mx.softmax(logits, axis=-1)
    else:
        beside = mx.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
        weights = mx.softmax(mx.concatenate([logits, beside], axis=-1), axis=-1)[..., :-1]
    outputs = weights @ values
    squares = mx.square(outputs).sum(-1)[..., None] + mx.square(values).sum(-1) - 2 * outputs @ values.T
    return weights, weights * mx.sqrt(mx.maximum(squares, 0))

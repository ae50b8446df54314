"""Attention weights of a block's queries over stored rows, for the methods that score by them."""

import mlx.core as mx

from velox_fn.engine import select
from velox_fn.engine.records import record
from velox_fn.engine.rows import Rows
from velox_fn.engine.store import Store, used_rows
from velox_fn.engine.widening import widened

# Bounds the weights held at a time to a few [B,H_q,64,n]: on the CPU, buffers of work that waits pile up.
_QUERIES_AT_ONCE = 64
_MASKED = -1e30  # finite, so that a query that sees nothing has no NaN


@record
class Observed:
    """What a block's queries see of the rows that it landed among."""

    rows: Rows
    scores: mx.array  # float32 [B,H,n], as they stand: +inf for sinks, -inf for padding and non-finite rows
    positions: mx.array  # int32 [B,H,n], -1 for padding
    queries: mx.array  # float32 [B,H,G,S,D], scaled; G query heads share a KV head
    query_positions: mx.array  # int32 [B,S]; -1 for the padding of a ragged block
    sinks: mx.array | None = None  # float32 [H,G]: a logit per query head that draws weight and has no row


def observe_rows(
    store: Store,
    queries: mx.array,
    scale: float | None = None,
    valid: mx.array | None = None,
    sinks: mx.array | None = None,
) -> Observed:
    """The rows of `store`, on which a block has landed, as the block's queries meet them.

    Args:
        store: as landing left it.
        queries: [B,H_q,S,D], after RoPE.
        scale: of the logits. None is 1/sqrt(D).
        valid: int32 [B], the real queries of each sequence. None: all are real.
        sinks: [H_q], the model's learned attention sinks: logits that take part in the softmax and have no row.

    Raises:
        ValueError: the query heads are no multiple of the KV heads, or there is not one sink for each.
    """
    batch, n_kv_heads = store.keys.shape[:2]
    n_heads, n_tokens, head_dim = queries.shape[1:]
    if n_heads % n_kv_heads or head_dim != store.keys.shape[3]:
        raise ValueError(
            f"queries must be [B, H_q, S, {store.keys.shape[3]}] with H_q a multiple of {n_kv_heads} KV heads, got "
            f"shape {tuple(queries.shape)}"
        )
    if sinks is not None and sinks.shape != (n_heads,):
        raise ValueError(f"sinks must be [{n_heads}], one per query head, got shape {tuple(sinks.shape)}")
    scale = head_dim**-0.5 if scale is None else scale
    grouped = queries.astype(mx.float32).reshape(batch, n_kv_heads, n_heads // n_kv_heads, n_tokens, head_dim)
    steps = mx.arange(n_tokens, dtype=mx.int32)
    first = store.offset - (n_tokens if valid is None else valid)
    query_positions = first[:, None] + steps
    if valid is not None:
        query_positions = mx.where(steps < valid[:, None], query_positions, -1)
    rows = used_rows(store)
    return Observed(
        rows=rows,
        scores=select.rank_scores(rows.ranks),
        positions=select.rank_positions(rows.ranks),
        queries=grouped * scale,
        query_positions=query_positions,
        sinks=None if sinks is None else sinks.astype(mx.float32).reshape(n_kv_heads, -1),
    )


def attention_mass(observed: Observed, power: int = 1) -> mx.array:
    """The sum of weights ** power over the block's queries, and over the query heads of a group.

    A query sees the rows at its own and earlier positions. Logits that are not finite are masked. The weights of a
    padding query are 0.

    Args:
        observed: of `observe_rows`.
        power: 1 or 2.

    Returns:
        float32 [B,H,n].
    """
    keys = widened(observed.rows.keys)
    n_rows, n_queries = keys.shape[2], observed.query_positions.shape[1]
    total = mx.zeros(observed.scores.shape, mx.float32)
    for start in range(0, n_queries, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, n_queries)
        unseen = n_queries - stop  # the block's rows stand last: these come after every query of this range
        weights = _weights(observed, keys[:, :, : n_rows - unseen], start, stop)
        mass = (weights if power == 1 else mx.square(weights)).sum(axis=(2, 3))
        total = total + mx.pad(mass, [(0, 0), (0, 0), (0, unseen)])
    return total


def _weights(observed: Observed, keys: mx.array, start: int, stop: int) -> mx.array:
    """Softmax weights float32 [B,H,G,S',n'] of queries `start` to `stop` over the first n' rows, of these keys."""
    batch, n_kv_heads, n_rows, head_dim = keys.shape
    queries = observed.queries[:, :, :, start:stop]
    logits = queries.reshape(batch, n_kv_heads, -1, head_dim) @ keys.swapaxes(-1, -2)
    logits = logits.reshape(*queries.shape[:-1], n_rows)
    # Kept rows precede the block, whose rows and padding stand alike in every head: the first one's mask is everyone's.
    at_row = observed.positions[:, :1, None, None, :n_rows]
    at_query = observed.query_positions[:, None, None, start:stop, None]
    visible = (at_row >= 0) & (at_row <= at_query)
    logits = mx.where(visible & mx.isfinite(logits), logits, _MASKED)
    sees = logits.max(axis=-1, keepdims=True) > _MASKED
    if observed.sinks is None:
        return mx.softmax(logits, axis=-1) * sees
    sinks = mx.broadcast_to(observed.sinks[..., None, None], (*logits.shape[:-1], 1))
    return mx.softmax(mx.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1] * sees

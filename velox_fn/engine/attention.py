"""Attention weights of a block's queries over stored rows, for the methods that score by them."""

import dataclasses
from collections.abc import Callable

import mlx.core as mx

from velox_fn.engine import select
from velox_fn.engine.records import record
from velox_fn.engine.rows import Rows
from velox_fn.engine.store import Store, readable, used_rows
from velox_fn.engine.widening import widened

# Bounds the weights held at a time, per query head: on the CPU, buffers of work that waits pile up.
_WEIGHTS_AT_ONCE = 2**17
_LEAST_AT_ONCE = 64  # queries: fewer would cost more in launches than they save
_MASKED = -1e30  # finite, so that a query that sees nothing has no NaN


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """A block's queries with the arrays that attention read in place of the view's, row for row.

    They are copies of the rows, in another dtype or once per query head, or what the model makes of a latent.
    """

    queries: mx.array  # [B,H_q,S,D']
    keys: mx.array  # [B,H',n,D'], H' a divisor of H_q and a multiple of H, rows as in the view
    added: mx.array | None = None  # numbers added to the scaled logits, of a shape that broadcasts to [B,H_q,S,n]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the queries."""
        return self.queries.shape


Queries = mx.array | Reading
"""The queries [B,H_q,S,D] of a block over the rows themselves, or with the arrays that they read."""
Noise = Callable[[mx.array, mx.array], mx.array]
"""(positions int32 [B,S'] of queries, [B,H,n'] of rows) -> numbers that broadcast to logits [B,H,G,S',n']"""


@record
class Observed:
    """What a block's queries see of the rows that it landed among."""

    rows: Rows  # with arrays for keys and values, also where they are stored quantised
    keys: mx.array  # [B,H',n,D'], as attention reads them: those of the rows, or others in their place
    scores: mx.array  # float32 [B,H,n], as they stand: +inf for sinks, -inf for padding and non-finite rows
    positions: mx.array  # int32 [B,H,n], -1 for padding
    queries: mx.array  # float32 [B,H',G',S,D'], scaled; G' query heads share one of `keys`
    query_positions: mx.array  # int32 [B,S]; -1 for the padding of a ragged block
    sinks: mx.array | None = None  # float32 [H,G]: a logit per query head that draws weight and has no row
    added: mx.array | None = None  # float32 [B,1 or H',1 or G',1 or S,n]: numbers added to the logits


def observe_rows(
    store: Store,
    queries: Queries,
    scale: float | None = None,
    valid: mx.array | None = None,
    sinks: mx.array | None = None,
) -> Observed:
    """The rows of `store`, on which a block has landed, as the block's queries meet them.

    Args:
        store: as landing left it.
        queries: [B,H_q,S,D], after RoPE, with the arrays that they read where these are not the rows.
        scale: of the logits. None is 1/sqrt(D).
        valid: int32 [B], the real queries of each sequence. None: all are real.
        sinks: [H_q], the model's learned attention sinks: logits that take part in the softmax and have no row.

    Raises:
        ValueError: the query heads are no multiple of the KV heads, queries read other rows than the store's, or there
            is not one sink for each.
    """
    rows = readable(store, used_rows(store))
    read = queries if isinstance(queries, Reading) else Reading(queries, rows.keys)
    batch, n_kv_heads, n_rows = rows.ranks.shape
    n_heads, n_tokens, head_dim = read.shape[1:]
    n_read, read_dim = read.keys.shape[1], read.keys.shape[3]
    if n_heads % n_read or n_read % n_kv_heads or head_dim != read_dim or read.keys.shape[2] != n_rows:
        raise ValueError(
            f"queries must be [B, H_q, S, {read_dim}] with H_q a multiple of {n_read} KV heads, got shape "
            f"{tuple(queries.shape)}, to read keys {tuple(read.keys.shape)} of {n_rows} rows in {n_kv_heads} heads"
        )
    if sinks is not None and sinks.shape != (n_heads,):
        raise ValueError(f"sinks must be [{n_heads}], one per query head, got shape {tuple(sinks.shape)}")
    scale = head_dim**-0.5 if scale is None else scale
    grouped = read.queries.astype(mx.float32).reshape(batch, n_read, n_heads // n_read, n_tokens, head_dim)
    steps = mx.arange(n_tokens, dtype=mx.int32)
    first = store.offset - (n_tokens if valid is None else valid)
    query_positions = first[:, None] + steps
    if valid is not None:
        query_positions = mx.where(steps < valid[:, None], query_positions, -1)
    return Observed(
        rows=rows,
        keys=read.keys,
        scores=select.rank_scores(rows.ranks),
        positions=select.rank_positions(rows.ranks),
        queries=grouped * scale,
        query_positions=query_positions,
        sinks=None if sinks is None else sinks.astype(mx.float32).reshape(n_kv_heads, -1),
        added=None if read.added is None else _grouped(read.added.astype(mx.float32), n_read),
    )


def attention_mass(observed: Observed, power: int = 1, noise: Noise | None = None) -> mx.array:
    """The sum of weights ** power over the block's queries, and over the query heads of a group.

    A query sees the rows at its own and earlier positions. Logits that are not finite are masked. The weights of a
    padding query are 0.

    Args:
        observed: of `observe_rows`.
        power: 1 or 2.
        noise: adds to the logits. It is asked for a range of queries at a time.

    Returns:
        float32 [B,H,n].
    """
    keys = widened(observed.keys)
    n_rows, n_queries = keys.shape[2], observed.query_positions.shape[1]
    total = mx.zeros(observed.scores.shape, mx.float32)
    at_once = max(_LEAST_AT_ONCE, _WEIGHTS_AT_ONCE // n_rows)
    for start in range(0, n_queries, at_once):
        stop = min(start + at_once, n_queries)
        unseen = n_queries - stop  # the block's rows stand last: these come after every query of this range
        weights = _weights(observed, keys[:, :, : n_rows - unseen], start, stop, noise)
        mass = (weights if power == 1 else mx.square(weights)).sum(axis=(2, 3))
        total = total + mx.pad(mass, [(0, 0), (0, 0), (0, unseen)])
    return total


def attention_weights(observed: Observed) -> mx.array:
    """The weights float32 [B,H,G,S,n] that `attention_mass` sums, of a few queries: all are held at once."""
    return _weights(observed, widened(observed.keys), 0, observed.query_positions.shape[1])


def _weights(observed: Observed, keys: mx.array, start: int, stop: int, noise: Noise | None = None) -> mx.array:
    """Softmax weights float32 [B,H,G,S',n'] of queries `start` to `stop` over the first n' rows, of these keys."""
    batch, n_read, n_rows, head_dim = keys.shape
    n_kv_heads = observed.scores.shape[1]
    queries = observed.queries[:, :, :, start:stop]
    logits = queries.reshape(batch, n_read, -1, head_dim) @ keys.swapaxes(-1, -2)
    logits = logits.reshape(*queries.shape[:-1], n_rows)
    if observed.added is not None:
        added = observed.added[..., :n_rows]
        logits = logits + (added if added.shape[3] == 1 else added[:, :, :, start:stop])
    logits = logits.reshape(batch, n_kv_heads, -1, *logits.shape[3:])
    if noise is not None:
        logits = logits + noise(observed.query_positions[:, start:stop], observed.positions[:, :, :n_rows])
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


def _grouped(added: mx.array, n_read: int) -> mx.array:
    """Numbers that broadcast to [B,H_q,S,n] as numbers that broadcast to [B,H',G',S,n]."""
    added = added.reshape(*(1,) * (4 - added.ndim), *added.shape)
    if added.shape[1] == 1:
        return added[:, :, None]
    return added.reshape(added.shape[0], n_read, -1, *added.shape[2:])

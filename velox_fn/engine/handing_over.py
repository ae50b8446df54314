"""One method after another on the same rows: a prompt under the first, what follows under the second."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from velox_fn.engine import select
from velox_fn.engine.batch import take
from velox_fn.engine.eviction import Eviction, State, StateT, kept_positions, kv
from velox_fn.engine.landing import written
from velox_fn.engine.records import replaced
from velox_fn.engine.store import Store


def hand_over(state: State, method: Eviction[StateT]) -> StateT:
    """A state of `method` that goes on with the rows that `state`, of any method, keeps.

    Rows stay at their true positions, and offsets go on. A static method scores each row at its position. A method
    that scores by attention has seen no query yet: its rows begin at 0, and the next queries decide. `state` stays
    usable.

    Args:
        state: of the method so far, of one sequence or of a batch.
        method: the one from here on. Nothing is evicted here, so its budget is the number of rows kept.

    Returns:
        The state. Read it as after an update of `method`'s own.

    Raises:
        ValueError: `method` is no Eviction; rows have left, and `method` keeps another number of rows, or more for a
            rollback; it evicts at intervals; or it scores rows by what it gathers from their first tokens on.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import h2o, hand_over, kept_positions, l2norm
        >>> first, second = l2norm(budget=32, recent=8), h2o(budget=32, grace=8)
        >>> rows = mx.random.normal((1, 2, 100, 16))
        >>> state, _ = first.update(first.init(1, 2, 16), rows, rows)
        >>> state = hand_over(state, second)
        >>> state, _ = second.update(state, rows[:, :, :1], rows[:, :, :1], queries=rows[:, :, :1])
        >>> kept_positions(state).max().item()
        100
    """
    if not isinstance(method, Eviction):
        raise ValueError(
            f"method must be an Eviction, got {method!r}; make it first, as h2o(budget=512) or "
            'METHODS["h2o"](budget=512) does'
        )
    so_far = state.store
    (keys, values), positions = kv(state), kept_positions(state)
    batch, n_kv_heads, n_rows, head_dim = keys.shape
    empty: Any = method.init(batch, n_kv_heads, head_dim, values.shape[3], keys.dtype)
    _check(method, empty.store, n_rows, so_far.seen_by_all)
    landed: Any
    if method.observation is not None:
        landed, _ = method.observation.land(empty, keys, values, None)
        none_yet = select.Scores(mx.zeros(positions.shape, mx.float32), unseen=(keys, values))
        ranks = select.arrival_ranks(none_yet, positions, empty.store.staying)
    else:
        arrival: Any = method.arrival  # there is one, or `_check` raises
        landed, _ = method.update(empty, keys, values)
        ranks = _ranks_at(arrival, empty, keys, values, positions)
    ranks = mx.where(positions < 0, select.PADDING, ranks)
    store = replaced(
        landed.store,
        ranks=written(landed.store.ranks, ranks, 0),
        offset=so_far.offset,
        ordered=so_far.seen_by_all >= n_rows,
        seen_by_all=so_far.seen_by_all,
    )
    handed: StateT = replaced(landed, store=store)
    return handed


def _check(method: Eviction, empty: Store, n_rows: int, seen_by_all: int) -> None:
    """ValueError unless `method` can go on with so many rows of another one."""
    if method.observation is None and (method.arrival is None or empty.warm_up):
        raise ValueError(
            f"{method.name} scores rows by what it gathers from the first token on, and would miss those that have "
            "left; take it from the start, or give it its calibrated arrays"
        )
    if empty.span is not None:
        raise ValueError(
            f"{method.name} evicts at intervals of {empty.span.interval} tokens, and the rows handed over need not end "
            "at a boundary; use interval=1"
        )
    if n_rows != empty.limit and not seen_by_all == n_rows < empty.limit:
        raise ValueError(
            f"{n_rows} rows are kept, and {method.name} is to go on with budget={empty.budget} and rollback="
            f"{empty.rollback}: nothing is evicted here, and rows that have left cannot come back; give it budget="
            f"{n_rows} and no rollback"
        )


def _ranks_at(
    arrival: Callable[[Any, mx.array, mx.array, None], mx.array],
    empty: Any,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
) -> mx.array:
    """The ranks int64 [B,H,n] that a static method gives rows at these positions int32 [B,H,n].

    Each row is asked about as a sequence whose next token it is: heads keep different positions.
    """
    batch, n_kv_heads, n_rows = positions.shape
    ranks = []
    for b in range(batch):
        each = take(empty, [b] * n_rows)
        tokens = [rows[b].swapaxes(0, 1)[:, :, None] for rows in (keys, values)]  # [n,H,1,D]
        for h in range(n_kv_heads):
            at = replaced(each, store=replaced(each.store, offset=positions[b, h]))
            ranks.append(arrival(at, tokens[0], tokens[1], None)[:, h, 0])
    return mx.stack(ranks).reshape(positions.shape)

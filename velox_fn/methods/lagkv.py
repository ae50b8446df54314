"""LagKV: keep the rows that spread most, relative to the tokens that follow them.

Tokens after the sinks are cut into partitions of `lag` tokens. With the least and greatest number of each channel in
the partition that follows, a row of partition p has for its key, and likewise for its value,

    n = (k - min_{p+1}) / (max_{p+1} - min_{p+1}),    s = softmax over the partition of the deviation of n over channels

and its score is the sum of both. A score is there once the next partition is full, and then stays. Until then rows are
protected: the last 2 lag - 1 tokens. So the kept set does not depend on how tokens are split into calls.

Source: "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important" (arXiv:2504.04704), by its
definition in the section on the method, whose number could not be checked, and the authors' code.

Differs from the paper:

- The budget is fixed, where the paper keeps a fixed share of each partition. To keep like shares, a row competes by its
  place among the rows of its partition. With `across=True` it competes by its score, and shares may be unlike.
- Places are shared by rows that differ by less than 2^-10 of an even share: beside a row that takes most of the
  softmax, the others differ by rounding alone.
- Rows of all partitions compete whenever some leave, where the paper cuts a partition once, when the next is full.
- Always 2 lag - 1 recent tokens stay. The paper keeps between lag and 2 lag - 1 of them.
- Numbers that are not finite do not count in a partition's range. A channel that varies by no more than
  rounding in it is not divided.
"""

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.dynamic import DynamicState, dynamic_init
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.rescored import rescored_eviction
from velox_fn.engine.rows import Rows, rows_at, temporal_order
from velox_fn.engine.widening import widened

_ROUNDING = 2.0**-10  # of half precision, relative


def lagkv(
    *,
    budget: int = 512,
    n_sink: int = 4,
    lag: int | None = None,
    across: bool = False,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[DynamicState]:
    """The LagKV method: keep the rows that spread most, relative to the tokens that follow them.

    Source: arXiv:2504.04704.

    Args:
        budget: most rows kept for each KV head, sinks and the last 2 lag - 1 tokens included.
        n_sink: leading tokens that always stay.
        lag: tokens of a partition. None is an eighth of the budget.
        across: compare scores across partitions, and not places within them.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that needs neither queries nor a calibration.

    Raises:
        ValueError: a count cannot work.

    Example:
        >>> from velox_fn import lagkv
        >>> lagkv(budget=256, lag=32).needs_queries
        False
    """
    budget = checks.rows_of_budget(budget)
    lag = max(1, budget // 8) if lag is None else checks.whole_number("lag", lag, 1)
    checks.one_of("across", across, (False, True))
    budget, n_sink, recent = checks.row_limits(budget, n_sink, 2 * lag - 1, recent_name="(2 * lag - 1)")

    def score(state: DynamicState, landed: DynamicState, rows: Rows, n_tokens: int) -> mx.array:
        before, after = (store.offset[:, None, None] - n_sink for store in (state.store, landed.store))
        n_partitions = n_tokens // lag + 3
        # From the first partition without scores on, every token is there: these are the last rows in temporal order.
        first = mx.maximum(before // lag - 1, 0)
        positions = select.rank_positions(rows.ranks)
        place = positions - n_sink - first * lag  # among the tokens from there on
        tokens = first * lag + mx.arange(n_partitions * lag)
        index = (positions >= 0).sum(-1, keepdims=True) - after + tokens
        index = mx.take_along_axis(temporal_order(rows.ranks), mx.clip(index, 0, rows.ranks.shape[2] - 1), axis=-1)
        there = ((tokens >= 0) & (tokens < after))[..., None]
        shape = (*rows.ranks.shape[:2], n_partitions, lag, -1)
        sums = [
            _spread(mx.where(there, widened(rows_at(half, index)), mx.nan).reshape(shape))
            for half in (rows.keys, rows.values)
        ]
        shares = sums[0] + sums[1]
        if not across:
            lower = shares[..., None, :] < shares[..., :, None] - _ROUNDING / lag
            shares = lower.sum(-1).astype(mx.float32)
        fresh = mx.take_along_axis(shares.flatten(2), mx.clip(place, 0, (n_partitions - 1) * lag - 1), axis=-1)
        full = (first + place // lag + 2) * lag <= after
        return mx.where((place >= 0) & full, fresh, select.rank_scores(rows.ranks))

    init = dynamic_init(budget=budget, n_sink=n_sink, recent=recent)
    settings = {"budget": budget, "n_sink": n_sink, "lag": lag, "across": across}
    method = rescored_eviction("lagkv", init, score, settings)
    return at_intervals(pinning(method, pinned), interval)


def _spread(rows: mx.array) -> mx.array:
    """Scores [B,H,P-1,lag] of rows [B,H,P,lag,D], by the range of the partition that follows theirs."""
    inside, reference = rows[:, :, :-1], rows[:, :, 1:]
    counted = mx.isfinite(reference)
    least = mx.where(counted, reference, mx.inf).min(3, keepdims=True)
    greatest = mx.where(counted, reference, -mx.inf).max(3, keepdims=True)
    span = greatest - least
    # The values of one token said again and again are the same but for rounding, which must decide nothing.
    varies = span > _ROUNDING * mx.maximum(mx.abs(least), mx.abs(greatest))
    known = mx.isfinite(span)
    normed = (inside - mx.where(known, least, 0.0)) / mx.where(known & varies, span, 1.0)
    off = normed - normed.mean(-1, keepdims=True)
    deviation = mx.sqrt(mx.square(off).sum(-1) / max(rows.shape[-1] - 1, 1))
    sound = mx.isfinite(deviation)
    return mx.softmax(mx.where(sound, deviation, -1e30), axis=-1) * sound

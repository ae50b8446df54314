"""CUR: what the CurDKV authors released. Rows are scored by their own norms within short windows.

Attention plays no part. Token i stands in a window of `window` consecutive tokens. Per KV head, |k_i|^2 and |v_i|^2
are each divided by their sum over that window. The score is one of the two shares, their mean, or their product.
Optionally the norms are those of a Gaussian sketch of keys and values. `curdkv` is the method by leverage.

Source: the code published with "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition"
(arXiv:2509.15038).

Differs from the release:

- The last window counts with its true length. The release pads it with zeros.
- Eviction goes on after the prompt. There the rows of the unfinished window are scored anew as it fills.
- `recent` trailing rows may be protected.
- The sketch is seeded.
"""

import mlx.core as mx

from velox_fn.engine import checks, select
from velox_fn.engine.dynamic import land, with_scores
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.half import depending
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.records import arrays, record
from velox_fn.engine.rows import View, arriving_positions
from velox_fn.engine.store import Store, init_store, readable, used_rows
from velox_fn.engine.widening import widened

COMBINE = ("key", "value", "mean", "product")


@record
class CURState:
    """Rows, and sums over the unfinished window. The sums count rows that were evicted from it too."""

    store: Store
    key_sum: mx.array  # float32 [B,H], of |k|^2
    value_sum: mx.array  # float32 [B,H], of |v|^2


def cur(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    combine: str = "product",
    window: int = 16,
    sketch: int | None = None,
    seed: int = 0,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[CURState]:
    """The CUR method: score rows by their own norms within short windows.

    Source: the code published with arXiv:2509.15038.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        combine: "key", "value", "mean" or "product".
        window: tokens that are normalised together, counted from position 0.
        sketch: columns of the Gaussian sketch whose norms stand in for the rows' own. None takes the rows' own.
        seed: of the sketch.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        An `Eviction` that needs neither queries nor a calibration.

    Raises:
        ValueError: a count cannot work, or the combination is unknown.

    Example:
        >>> from velox_fn import cur
        >>> cur(budget=256, combine="value").static
        False
    """
    budget, n_sink, recent = checks.row_limits(budget, n_sink, recent)
    checks.one_of("combine", combine, COMBINE)
    window = checks.whole_number("window", window, 1)
    seed = checks.whole_number("seed", seed, 0, 2**64 - 1)
    if sketch is not None:
        sketch = checks.whole_number("sketch", sketch, 1)

    def init(
        batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> CURState:
        store = init_store(batch, n_kv_heads, head_dim, value_dim, dtype, budget=budget, n_sink=n_sink, recent=recent)
        nothing = mx.zeros((batch, n_kv_heads), mx.float32)
        return CURState(store=store, key_sum=nothing, value_sum=nothing)

    def energies(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        key_draw, value_draw = mx.random.split(mx.random.key(seed))
        return _energy(keys, sketch, key_draw), _energy(values, sketch, value_draw)

    def update(
        state: CURState,
        keys: mx.array,
        values: mx.array,
        *,
        queries: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[CURState, View]:
        landed, view = land(state, keys, values, valid)
        keys, values = state.store.widths.read(keys, values)
        n_tokens = keys.shape[2]
        first = (state.store.offset // window)[:, None, None]  # the window that is unfinished, or begins
        arrived = arriving_positions(state.store.offset, n_tokens, valid) // window - first  # padding: below 0
        member = (arrived[..., None] == mx.arange(n_tokens // window + 2)).astype(mx.float32)  # [B,1,S,windows]
        rows = readable(landed.store, used_rows(landed.store))
        at = select.rank_positions(rows.ranks) // window - first
        shares, open_sums = [], []
        for new, kept, open_sum in zip(
            energies(keys, values),
            energies(rows.keys, rows.values),
            (state.key_sum, state.value_sum),
            strict=True,
        ):
            sums = (mx.where(mx.isfinite(new), new, 0.0)[:, :, None] @ member)[:, :, 0]
            sums = mx.concatenate([sums[..., :1] + open_sum[..., None], sums[..., 1:]], axis=-1)
            whole = mx.take_along_axis(sums, mx.maximum(at, 0), axis=-1)
            shares.append(kept / mx.where(whole > 0, whole, 1.0))
            still_open = landed.store.offset[:, None, None] // window - first
            open_sums.append(
                mx.take_along_axis(sums, mx.broadcast_to(still_open, (*sums.shape[:2], 1)), axis=-1)[..., 0]
            )
        scores = mx.where(at >= 0, _combined(combine, *shares), select.rank_scores(rows.ranks))
        store = with_scores(landed.store, scores, n_tokens)
        settled = CURState(store=store, key_sum=open_sums[0], value_sum=open_sums[1])
        return settled, depending(view, arrays(settled))

    settings = {
        "budget": budget,
        "n_sink": n_sink,
        "recent": recent,
        "combine": combine,
        "window": window,
        "sketch": sketch,
        "seed": seed,
    }
    method = Eviction(init, update, "cur", settings, static=False)
    return at_intervals(pinning(method, pinned), interval)


def _energy(rows: mx.array, sketch: int | None, draw: mx.array) -> mx.array:
    """|x|^2 float32 [B,H,n] of rows [B,H,n,D], or of their sketch."""
    exact = widened(rows)
    if sketch is not None:
        exact = exact @ mx.random.normal((rows.shape[-1], sketch), key=draw)
    return mx.square(exact).sum(-1)


def _combined(combine: str, of_key: mx.array, of_value: mx.array) -> mx.array:
    if combine == "product":
        return of_key * of_value
    if combine == "mean":
        return (of_key + of_value) / 2
    return of_key if combine == "key" else of_value

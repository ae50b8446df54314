"""Random eviction: keep rows by lot, the floor that any informed method must beat.

A row's score is a hash of (seed, layer, head, position), uniform in [0, 1). It does not depend on what else is in the
batch, nor on how the tokens were split into calls. So a run can be repeated.
"""

import mlx.core as mx

from velox_fn.engine.draws import checked_draws, drawn_bits, layer_key, uniform
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, StaticState, static_eviction


def random_eviction(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    seed: int = 0,
    layer: int = 0,
    first_head: int = 0,
    rollback: int = 0,
    use_metal_kernels: bool | None = None,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction[StaticState]:
    """The random method: keep rows by lot, the floor that any informed method must beat.

    Source: no paper.

    Args:
        budget: most rows kept for each KV head, sinks and recent rows included.
        n_sink: leading tokens that always stay.
        recent: trailing tokens that always stay.
        seed: of the draw; a whole number below 2^32, like the next two.
        layer: the layer's index, so that layers draw apart.
        first_head: the index, among the layer's KV heads, of the first one that this cache holds. Not 0 where a model's
            heads are spread over machines.
        rollback: tokens that can be taken back after evictions.
        use_metal_kernels: for eviction. True or False; None uses them where they run.
        interval: rows leave only at multiples of it (`at_intervals`).
        pinned: half-open ranges of positions that always stay (`pinning`).

    Returns:
        A static `Eviction`.

    Raises:
        ValueError: a count cannot work, or seed, layer or first_head is not below 2^32.

    Example:
        >>> from velox_fn import random_eviction
        >>> random_eviction(budget=256, seed=7).settings["seed"]
        7
    """
    draws = checked_draws(seed, layer, first_head)
    method = static_eviction(
        "random",
        _drawn,
        budget=budget,
        n_sink=n_sink,
        recent=recent,
        rollback=rollback,
        use_metal_kernels=use_metal_kernels,
        numbers=(
            mx.array(layer_key(draws["seed"], draws["layer"]), mx.uint32),
            mx.array(draws["first_head"], mx.uint32),
        ),
        settings=draws,
    )
    return at_intervals(pinning(method, pinned), interval)


def _drawn(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    of_layer, first_head = params  # uint32 [B,1,1]
    return Scores(uniform(drawn_bits(of_layer, first_head, positions, keys.shape[1])), unseen=(keys, values))

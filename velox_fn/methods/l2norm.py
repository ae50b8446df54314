"""L2Norm: keep the keys of the smallest norm.

Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv:2406.11430), section 3: keys of
a low L2 norm get high attention, so a row scores

    s_i = -|k_i|^2

(the square orders rows as the norm does and needs no root).

Differs from the paper: `n_sink` leading tokens always stay; `recent` trailing ones may (0 unless asked for); the paper
leaves the first two layers whole, here every layer has the budget that it is given.
"""

import mlx.core as mx

from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.pinned import Pinned, pinning
from velox_fn.engine.scorers import square_terms
from velox_fn.engine.select import Scores
from velox_fn.engine.static import Params, static_eviction


def l2norm(
    *,
    budget: int = 512,
    n_sink: int = 4,
    recent: int = 0,
    rollback: int = 0,
    interval: int = 1,
    pinned: Pinned = (),
) -> Eviction:
    """The L2Norm method. ValueError on counts that cannot work."""
    method = static_eviction(
        "l2norm", _minus_squared_norm, budget=budget, n_sink=n_sink, recent=recent, rollback=rollback
    )
    return at_intervals(pinning(method, pinned), interval)


def _minus_squared_norm(keys: mx.array, values: mx.array, positions: mx.array, params: Params) -> Scores:
    return Scores(-square_terms(keys), unseen=(values,))

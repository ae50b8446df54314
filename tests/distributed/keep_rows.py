"""python keep_rows.py FOLDER none|heads|layers ...: what each method keeps of one prompt, and the logits, by rank."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from small_models import arguments, small_model, some_filters

from velox_cache import KVCacheBuilder, KVCacheConfig, install
from velox_cache.introspection.query_tap import row_caches
from velox_fn import kept_positions

TOKENS = np.random.default_rng(0).integers(0, 97, 60).tolist()
BLOCKS = (0, 24, 25, 26, 50, 60)

MOST = 16  # rows of any head
# One rank's heads and layers have several budgets where another's have one.
TIERS = [[12, 12, 12, 14, 16, 14], 14, [12, 12, 12, 16, 16, 14]]

METHODS = {
    "qfilters": {"filters": some_filters()},
    "random": {"seed": 3},
    "h2o": {"grace": 2},
}


def run(model: nn.Module, caches: list[Any]) -> dict[str, np.ndarray]:
    for start, stop in pairwise(BLOCKS):
        logits = model(mx.array([TOKENS[start:stop]]), cache=caches)
        mx.eval(logits, [cache.state for cache in caches])
    kept = {f"kept_{layer}": kept_by(cache) for layer, cache in enumerate(caches)}
    return kept | {"logits": np.array(logits)[0, -1], "held": np.array([cache.nbytes for cache in caches])}


def kept_by(cache: Any) -> np.ndarray:
    """Positions by head; -1 after those of heads that keep fewer."""
    heads = getattr(cache, "heads", None)
    tiers = row_caches([cache])
    of_each = [range(tier.record.store.ranks.shape[1]) for tier in tiers] if heads is None else heads.of_each
    found = np.full((sum(map(len, of_each)), MOST), -1)
    for own, tier in zip(of_each, tiers, strict=True):
        at = np.array(kept_positions(tier.record))[0]
        found[list(own), : at.shape[1]] = at
    return found


rank, folder, *spreads = arguments()
for spread in spreads:
    model = small_model(spread)
    for method, settings in METHODS.items():
        install(model, method, budget=16, calibrate=False, **settings)
        np.savez(f"{folder}/{spread}_{method}_{rank}.npz", **run(model, make_prompt_cache(model)))
    install(model, "qfilters", budget=[12, 14, 16], calibration=some_filters())
    np.savez(f"{folder}/{spread}_budgets_{rank}.npz", **run(model, make_prompt_cache(model)))
    install(model, "h2o", budget=TIERS, grace=2)
    np.savez(f"{folder}/{spread}_tiers_{rank}.npz", **run(model, make_prompt_cache(model)))
    install(model, "l2norm", budget=TIERS)
    np.savez(f"{folder}/{spread}_static_tiers_{rank}.npz", **run(model, make_prompt_cache(model)))
    config = KVCacheConfig(method="qfilters", qfilters_budget=16, qfilters_recent=4)
    caches = KVCacheBuilder.for_model(model, config, some_filters())
    np.savez(f"{folder}/{spread}_builder_{rank}.npz", **run(model, caches))

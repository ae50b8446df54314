"""python keep_rows.py FOLDER none|heads|layers ...: what each method keeps of one prompt, and the logits, by rank."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from small_models import arguments, small_model, some_filters

from velox_cache import KVCacheBuilder, KVCacheConfig, install
from velox_fn import kept_positions

TOKENS = np.random.default_rng(0).integers(0, 97, 60).tolist()
BLOCKS = (0, 24, 25, 26, 50, 60)

METHODS = {
    "qfilters": {"filters": some_filters()},
    "random": {"seed": 3},
    "h2o": {"grace": 2},
}


def run(model: nn.Module, caches: list[Any]) -> dict[str, np.ndarray]:
    for start, stop in pairwise(BLOCKS):
        logits = model(mx.array([TOKENS[start:stop]]), cache=caches)
        mx.eval(logits, [cache.state for cache in caches])
    kept = {f"kept_{layer}": np.array(kept_positions(cache.record))[0] for layer, cache in enumerate(caches)}
    return kept | {"logits": np.array(logits)[0, -1], "held": np.array([cache.nbytes for cache in caches])}


rank, folder, *spreads = arguments()
for spread in spreads:
    model = small_model(spread)
    for method, settings in METHODS.items():
        install(model, method, budget=16, calibrate=False, **settings)
        np.savez(f"{folder}/{spread}_{method}_{rank}.npz", **run(model, make_prompt_cache(model)))
    install(model, "qfilters", budget=[12, 14, 16], calibration=some_filters())
    np.savez(f"{folder}/{spread}_budgets_{rank}.npz", **run(model, make_prompt_cache(model)))
    config = KVCacheConfig(method="qfilters", qfilters_budget=16, qfilters_recent=4)
    caches = KVCacheBuilder.for_model(model, config, some_filters())
    np.savez(f"{folder}/{spread}_builder_{rank}.npz", **run(model, caches))

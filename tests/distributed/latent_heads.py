"""python latent_heads.py FOLDER none|heads: what each rank calibrates and keeps of a model of latent attention."""

import mlx.core as mx
import numpy as np
from small_models import CharacterTokenizer, arguments

from velox_cache import calibrate, install
from velox_cache.architectures.tiny import tiny_model
from velox_fn import kept_positions

rank, folder, spread = arguments()
model = tiny_model("deepseek_v3", vocab_size=97)
if spread == "heads":
    model.shard(mx.distributed.init())
calibration = calibrate(model, CharacterTokenizer(), ["some words of a text, " * 8], progress=False)
refused = ""
try:
    install(model, "h2o", budget=24)
except ValueError as error:
    refused = str(error)
found = {"refused": np.array(refused)}
for method, given in (("qfilters", calibration), ("random", None)):
    install(model, method, budget=12, calibration=given)
    caches = model.make_cache()
    mx.eval(model(mx.array([list(range(40))]), cache=caches))
    found |= {f"{method}_{i}": np.array(kept_positions(cache.record)) for i, cache in enumerate(caches)}
found |= {f"filters_{i}": np.array(layer) for i, layer in enumerate(calibration.filters) if layer is not None}
np.savez(f"{folder}/{spread}_{rank}.npz", **found)

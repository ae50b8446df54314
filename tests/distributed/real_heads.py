"""python real_heads.py FOLDER MODEL none|heads: what Q-Filters keeps of a prompt on a real model, and the logits."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load, sharded_load
from small_models import arguments

from velox_cache import Calibration, install
from velox_fn import kept_positions

rank, folder, path, spread = arguments()
model, tokenizer = load(path) if spread == "none" else sharded_load(path, None, mx.distributed.init())
shape = (model.args.num_key_value_heads, model.args.hidden_size // model.args.num_attention_heads)
drawn = [mx.random.normal(shape, key=mx.random.key(layer)) for layer in range(len(model.layers))]
install(model, "qfilters", budget=24, calibration=Calibration(drawn))
tokens = tokenizer.encode("The lighthouse keeper climbed the stairs, lit the lamp, and wrote down the weather. " * 3)
caches = make_prompt_cache(model)
for start, stop in ((0, 40), (40, 41), (41, 42)):
    logits = model(mx.array([tokens[start:stop]]), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
kept = np.stack([np.array(kept_positions(cache.record))[0] for cache in caches])
np.savez(f"{folder}/{spread}_{rank}.npz", kept=kept, logits=np.array(logits)[0, -1])

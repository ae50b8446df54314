"""Runs rows.py in the environment of the wheel; says where the packages came from."""

import mlx.core as mx
import rows
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

import metal_src
import velox_cache
import velox_fn

BUDGET = 8
block = (mx.random.normal((1, 4, 20, 16)), mx.random.normal((1, 4, 20, 16)))
recent, small = rows.heads_apart(BUDGET, block)
assert recent[0, 0].tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
assert small.shape == (1, 2, BUDGET)
assert rows.steps(block, mx.ones((4, 16)), BUDGET).store.most_kept == BUDGET
assert rows.fed(rows.factories()["l2norm"](budget=BUDGET), block).offset == 20
assert rows.compiled_steps(block, 2 * BUDGET + 8).store.seen_by_all == 20
assert "l2norm" in rows.saved([rows.fed(rows.factories()["l2norm"](budget=BUDGET), block)])
assert rows.kept_of(rows.fed(rows.factories()["l2norm"](budget=BUDGET), block)) is not None

model = llama.Model(
    llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=32,
    )
)
print(rows.bounded(model, BUDGET))
caches = model.make_cache()
tokens = [token for token, _ in generate_step(mx.arange(16), model, max_tokens=4, prompt_cache=caches)]
assert len(tokens) == 4
velox_cache.save_prompt_cache("saved.safetensors", caches)
loaded = velox_cache.load_prompt_cache("saved.safetensors")
assert [cache.offset for cache in loaded] == [cache.offset for cache in caches]

for package in (velox_fn, velox_cache, metal_src):
    print("from", package.__file__)

"""What a token costs under a model whose heads have budgets of their own, beside the same rows shared out evenly."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.bench.decoding import TOKENS, decode
from velox_cache.bench.end_to_end import PROMPT, bench_prompt
from velox_cache.bench.rounds import Call, Comparison, compare
from velox_cache.installation.installing import install, uninstall
from velox_cache.introspection.key_layouts import KeyLayouts
from velox_cache.introspection.query_tap import observe_queries

_METHOD = "l2norm"  # needs nothing of a model
_SHARES = {"one budget": (1,), "two tiers": (0.5, 1.5), "three tiers": (0.5, 1, 1.5)}  # of the budget, head by head


def tier_steps(model: nn.Module, tokenizer: TokenizerWrapper, *, budget: int, rounds: int) -> Comparison:
    """Eight tokens decoded with all heads of a layer in one, two and three tiers, in turns.

    Numbers of rows take turns over a layer's heads; where these do not divide, the total is not quite the same. A model
    with fewer KV heads than tiers has as many tiers as heads. The model ends up with its own caches.
    """
    prompt, layouts = mx.array(bench_prompt(tokenizer))[None], KeyLayouts(model)

    def budgets(shares: Sequence[float], layer: int) -> list[int]:
        layout = layouts.of_layer(layer)
        n_heads = 1 if layout is None else layout.n_kv_heads
        return [round(budget * shares[head % len(shares)]) for head in range(n_heads)]

    arms: dict[str, Call] = {}
    with observe_queries(model):
        for label, shares in _SHARES.items():
            install(model, _METHOD, budget=partial(budgets, shares))
            cache = make_prompt_cache(model)
            mx.eval(model(prompt, cache=cache))
            arms[label] = partial(decode, model, cache)
            uninstall(model)
        setting = f"{TOKENS} tokens, {_METHOD}, budget {budget}, after {PROMPT}"
        return compare("decoding in tiers", setting, arms, rounds=rounds)

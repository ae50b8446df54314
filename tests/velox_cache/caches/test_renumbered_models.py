"""Renumbered, a model of one layer says what it says of a text that holds the kept tokens alone."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
from velox_cache.architectures.tiny import tiny_model as any_model

TOKENS = [(7 * i * i + 3 * i) % 61 for i in range(230)]
BUDGET = 12


@pytest.mark.parametrize("architecture", ["llama", "stablelm", "deepseek_v2", "minicpm3", "youtu_llm"])
def test_logits_are_those_of_the_kept_tokens_alone_and_stay_so(architecture: str) -> None:
    model = any_model(architecture, num_hidden_layers=1)
    vc.install(model, "streaming_llm", budget=BUDGET, n_sink=2, renumber=True)
    caches, kept = make_prompt_cache(model), []
    vc.uninstall(model)
    for start, stop in [(0, 30), *((t, t + 1) for t in range(30, 230))]:
        logits = model(mx.array([TOKENS[start:stop]]), cache=caches)[0, -1]
        seen = [*kept, *TOKENS[start:stop]]
        alone = model(mx.array([seen]), cache=make_prompt_cache(model))[0, -1]
        np.testing.assert_allclose(np.array(logits), np.array(alone), atol=2e-3, err_msg=f"token {stop}")
        kept = TOKENS[:2] + TOKENS[stop - BUDGET + 2 : stop]

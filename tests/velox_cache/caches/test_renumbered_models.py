"""Renumbered, a model of one layer says what it says of a text that holds the kept tokens alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
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


class AfterAnImage(llama.Attention):
    """A llama's whose rotary positions run behind the tokens by `delta`, as those after an image's tokens do."""

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: mx.array | None = None
    ) -> mx.array:
        projected = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (rows.reshape(*x.shape[:2], -1, 8).swapaxes(1, 2) for rows in projected)
        at = max(cache.offset - self.delta, 0)
        keys, values = cache.update_and_fetch(self.rope(keys, offset=at), values)
        out = scaled_dot_product_attention(self.rope(queries, offset=at), keys, values, cache, self.scale, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).reshape(x.shape))


@pytest.fixture
def shown_an_image(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    made = tiny_model()
    for layer in made.layers:
        layer.self_attn.__class__ = AfterAnImage
        layer.self_attn.delta = 17
    return made


@pytest.mark.parametrize("method", ["qfilters", "h2o", "streaming_llm", "expected_attention"])
def test_positions_that_are_no_token_indices_are_the_models_own_within_budget(
    shown_an_image: nn.Module, method: str, tmp_path: Path
) -> None:
    model, plain = shown_an_image, make_prompt_cache(shown_an_image)
    vc.install(model, method, budget=200)
    caches = make_prompt_cache(model)
    blocks = [TOKENS[:30], TOKENS[30:31], TOKENS[31:40], TOKENS[40:41]]
    for block in blocks:
        expected = model(mx.array([block]), cache=plain)
        np.testing.assert_allclose(np.array(model(mx.array([block]), cache=caches)), np.array(expected), atol=1e-5)
        vc.save_prompt_cache(tmp_path / "caches.safetensors", caches)
        caches = vc.load_prompt_cache(tmp_path / "caches.safetensors")


@pytest.mark.parametrize("method", ["h2o", "streaming_llm"])
def test_positions_that_are_no_token_indices_cannot_be_renumbered(shown_an_image: nn.Module, method: str) -> None:
    with pytest.raises(ValueError, match="AfterAnImage takes position_ids"):
        vc.install(shown_an_image, method, budget=40, renumber=True)


def test_expected_attention_does_without_positions_that_are_no_token_indices(shown_an_image: nn.Module) -> None:
    vc.install(shown_an_image, "expected_attention", budget=40)
    assert shown_an_image.make_cache()[0].method.settings["rope"] is None

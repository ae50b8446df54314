"""Latent attention: queries in the space of what is cached, calibration from them, and what is refused."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from runs import PROMPT, evicting, installed, rows_of, run
from tiny_models import LATENT, LATENT_TWICE, model_of

import velox_cache as vc
from velox_cache.calibration.predicted_attention import true_mean_attention
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.introspection.observed_prefill import LayerQueries, observed_prefill
from velox_cache.introspection.plan import plain_caches
from velox_cache.learning.weight_search import SearchSizes, search_weights
from velox_fn import kept_positions

TERMS = "projection+key_difference"


class Letters:
    """A tokenizer whose tokens are the letters of a text."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 64 for letter in text]


TEXT = "a cache of latents holds one row for each token, and all heads read it. " * 2


@pytest.fixture(scope="module", params=["deepseek_v3", "kimi_linear", "mistral4"])
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def calibration(architecture: str) -> vc.Calibration:
    return vc.calibrate(model_of(architecture), Letters(), [TEXT], progress=False, prefill_step_size=16)


def logits(call: LayerQueries) -> np.ndarray:
    """[H_q,S,n] of one block, the future included."""
    found = call.scale * rows_of(call.queries)[0] @ rows_of(call.keys)[0].swapaxes(-1, -2)
    return np.array(found + rows_of(mx.maximum(call.terms["mask"], -1e9))[0]) if "mask" in call.terms else found


@pytest.mark.parametrize("name", LATENT)
def test_queries_of_a_block_are_those_of_its_tokens_one_by_one(name: str) -> None:
    """One token's query meets the latents in the model itself."""
    model = model_of(name)
    [block] = observed_prefill(model, PROMPT)
    alone = list(observed_prefill(model, PROMPT, prefill_step_size=1))
    for i, call in enumerate(block):
        assert call.queries.shape[3] == call.keys.shape[3]
        last = alone[-1][i]
        np.testing.assert_allclose(rows_of(call.queries)[:, :, -1:], rows_of(last.queries), atol=1e-4)
        np.testing.assert_allclose(logits(call)[:, -1:], logits(last), atol=1e-4)


@pytest.mark.parametrize("name", LATENT)
def test_attention_that_latents_receive_is_that_of_the_models_softmax(name: str) -> None:
    """So that a calibration can say how well it foretells it."""
    n = len(PROMPT)
    [block] = observed_prefill(model_of(name), PROMPT)
    for call in block:
        seen = np.where(np.tri(n, dtype=bool), logits(call), -np.inf)
        weights = np.exp(seen - seen.max(-1, keepdims=True))
        expected = (weights / weights.sum(-1, keepdims=True)).mean(0).sum(0) / np.arange(n, 0, -1)
        mask = call.terms.get("mask")
        found = true_mean_attention(call.queries[0], call.keys[0], call.scale, mask=None if mask is None else mask[0])
        np.testing.assert_allclose(np.array(found)[0], expected, atol=1e-5)


def test_calibrated_directions_are_those_of_queries_over_the_latents(
    architecture: str, calibration: vc.Calibration
) -> None:
    tokens = Letters().encode(TEXT)
    calls = [call for block in observed_prefill(model_of(architecture), tokens) for call in block]
    for call in calls:
        heads = rows_of(call.queries)[0]
        directions = []
        for queries in heads:
            u, _, vt = np.linalg.svd(queries, full_matrices=False)
            directions.append(vt[0] * np.sign(u[:, 0].sum()))
        mean = np.mean(directions, axis=0)
        expected = mean / np.linalg.norm(mean)
        np.testing.assert_allclose(np.array(calibration.filters[call.layer])[0], expected, atol=1e-3)


@pytest.mark.parametrize(("method", "settings"), [("qfilters", {}), ("keydiff", {}), ("fusion", {"terms": TERMS})])
def test_methods_with_calibrated_directions_bound_it(
    architecture: str, calibration: vc.Calibration, method: str, settings: dict[str, Any]
) -> None:
    kept = []
    for lengths in ((28,), (17, 1, 1, 9)):
        with installed(architecture, method, budget=12, calibration=calibration, recent=0, **settings) as model:
            _, caches = run(model, lengths)
        first = evicting(caches)[0]  # later layers see what earlier ones left
        kept.append(np.array(kept_positions(first.record)))
    assert kept[0].shape == (1, 1, 12)
    np.testing.assert_array_equal(*kept)


@pytest.mark.parametrize("method", ["h2o", "tova", "snapkv"])
def test_methods_by_attention_stay_in_their_budget(architecture: str, method: str) -> None:
    settings = {"h2o": {"grace": 2}, "snapkv": {"obs_window": 4}}.get(method, {})
    with installed(architecture, method, budget=12, **settings) as model:
        _, caches = run(model, (17, 1, 1, 9))
    assert {(cache.size(), cache.offset) for cache in evicting(caches)} == {(12, 28)}


@pytest.mark.parametrize("method", ["h2o", "l2norm"])
def test_a_shared_prefill_leaves_what_the_models_own_does(architecture: str, method: str) -> None:
    shared = shared_prefill(model_of(architecture), PROMPT)
    with installed(architecture, method, budget=12, **({"grace": 2} if method == "h2o" else {})) as model:
        own = run(model, (len(PROMPT),))[1]
        filled = shared.into(make_prompt_cache(model))
    for one, other in zip(evicting(filled), evicting(own), strict=True):
        np.testing.assert_array_equal(*(np.array(kept_positions(cache.record)) for cache in (one, other)))


@pytest.mark.parametrize("method", ["curdkv", "cur", "expected_attention", "lagkv", "learned"])
def test_methods_that_weigh_values_are_refused_by_name_before_anything_is_calibrated(
    architecture: str, method: str
) -> None:
    with pytest.raises(ValueError, match=f"{method} scores a row by its value, and this model caches none"):
        vc.install(model_of(architecture), method, budget=12)


def test_terms_that_weigh_values_are_refused_by_name(architecture: str, calibration: vc.Calibration) -> None:
    with pytest.raises(
        ValueError, match=r"value_norm scores a row by its value.* give terms='projection\+key_difference'"
    ):
        vc.install(model_of(architecture), "fusion", budget=12, calibration=calibration, terms=f"value_norm+{TERMS}")


def test_the_default_method_leaves_its_term_of_values_out_and_says_so(
    architecture: str, calibration: vc.Calibration
) -> None:
    model = model_of(architecture)
    try:
        report = vc.install(model, budget=12, calibration=calibration)
        _, caches = run(model, (17, 1, 10))
    finally:
        vc.uninstall(model)
    assert (report.method, report.settings["terms"]) == ("fusion", TERMS)
    assert "the term value_norm is left out: it scores a row by its value, and this model caches none" in str(report)
    assert {(cache.size(), cache.offset) for cache in evicting(caches)} == {(12, 28)}


@pytest.mark.calibrates
def test_nothing_need_be_chosen_or_made_before(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = model_of(architecture)
    try:
        made = vc.install(model, budget=12, tokenizer=Letters())
        found = vc.install(model, budget=12)
    finally:
        vc.uninstall(model)
    assert str(made) == str(found)
    assert made.settings["terms"] == TERMS
    assert "predicts attention on unseen text with rank correlation" in str(made)


def test_models_with_values_keep_every_term() -> None:
    model = model_of("llama")
    made = vc.calibrate(model, Letters(), [TEXT], progress=False, prefill_step_size=16)
    try:
        report = vc.install(model, budget=12, calibration=made)
    finally:
        vc.uninstall(model)
    assert "value_norm" in report.settings["terms"]
    assert report.left_out is None


def test_a_search_of_weights_is_for_the_terms_that_install_takes(
    architecture: str, calibration: vc.Calibration
) -> None:
    sizes = SearchSizes(n_prompts=1, n_held_out=1, n_context=32, n_scored=8, budgets=(0.5, 0.6))
    found = search_weights(
        model_of(architecture), Letters(), calibration, [TEXT], seconds=60, most_steps=1, sizes=sizes
    )
    assert found.steps == 1
    assert found.calibration.fusion is None or found.calibration.fusion.terms == tuple(TERMS.split("+"))


def test_the_models_queries_are_refused_at_intervals(architecture: str) -> None:
    with pytest.raises(ValueError, match="cannot be scored at intervals"):
        vc.install(model_of(architecture), "h2o", budget=64, interval=16)
    with installed(architecture, "h2o", budget=64, interval=16, queries="proxy") as model:
        run(model, (16, 1, 11))


@pytest.mark.parametrize("name", LATENT_TWICE)
def test_two_attentions_of_a_layer_are_not_calibrated_as_one(name: str) -> None:
    model = model_of(name)
    with pytest.raises(ValueError, match=r"several attentions with a cache each.*take a method that needs none"):
        vc.install(model, budget=12, tokenizer=Letters())
    with pytest.raises(ValueError, match="several attentions with a cache each"):
        vc.calibrate(model, Letters(), [TEXT], progress=False)
    with installed(name, "h2o", budget=12, grace=2) as bounded:
        _, caches = run(bounded, (17, 1, 10))
    assert {(cache.size(), cache.offset) for cache in evicting(caches)} == {(12, 28)}
    assert len(evicting(caches)) == 2 * len(model.layers)


def test_filters_of_other_heads_are_refused(architecture: str) -> None:
    model = model_of(architecture)
    filters = [mx.ones((4, 16)) for _ in plain_caches(model)]
    with pytest.raises(ValueError, match="has 1 KV heads of dimension 16"):
        vc.install(model, "qfilters", budget=12, calibration=vc.Calibration(filters))

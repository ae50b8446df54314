"""What enters a model's softmax beside scaled logits: learned sinks are in the scores, anything else is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
from velox_cache.calibration.predicted_attention import attention_correlation, true_mean_attention
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.introspection.query_tap import ObservedAttention
from velox_fn import METHODS
from velox_fn.engine.select import rank_scores
from velox_fn.engine.store import used_rows

CALLS = [[(7 * i * i + 3 * i) % 97 for i in range(25)], [5], [11, 3, 8]]
FULL = 1  # gpt_oss's layers slide in turn
SCORED: dict[str, dict[str, Any]] = {
    "h2o": {"grace": 0},
    "tova": {},
    "snapkv": {"obs_window": 3, "kernel": 1},
    "curdkv": {"solver": "eigh", "rank_cap": 64},
}
BY_ATTENTION = [name for name, factory in METHODS.items() if factory(budget=64).needs_queries]


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    """A random gpt_oss whose sinks take a share of attention that no head can overlook."""
    made = tiny_model("gpt_oss")
    for layer in made.layers:
        layer.self_attn.sinks = mx.array([3.0, -1.0, 2.0, 0.5])
    return made


def run(model: nn.Module, caches: Sequence[Any]) -> None:
    mx.eval([model(mx.array([block]), cache=caches) for block in CALLS])


def observed_calls(model: nn.Module) -> list[ObservedAttention]:
    """The calls of the full-attention layer, under plain caches."""
    seen: list[ObservedAttention] = []
    caches = make_prompt_cache(model)
    with vc.observe_queries(model, seen.append, caches=[caches[FULL]]):
        run(model, caches)
    return seen


def weights(call: ObservedAttention, sinks: mx.array) -> np.ndarray:
    """Attention's own weights [H,G,S,n]: what it puts out where the values are the identity."""
    n_rows, (_, n_heads, n_queries, _) = call.keys.shape[2], call.queries.shape
    values = mx.broadcast_to(mx.eye(n_rows), (1, call.keys.shape[1], n_rows, n_rows))
    out = mx.fast.scaled_dot_product_attention(
        call.queries, call.keys, values, scale=call.scale, mask="causal", sinks=sinks
    )
    return np.array(out).reshape(call.keys.shape[1], n_heads // call.keys.shape[1], n_queries, n_rows)


def leverage(weighted: np.ndarray) -> np.ndarray:
    """Energy of each row [H,n] in the stacked weighted blocks [H,T,n,D_v], as shares of the whole."""
    energy = (weighted**2).sum((1, 3))
    return energy / energy.sum(-1, keepdims=True)


def expected_scores(method: str, calls: Sequence[ObservedAttention], sinks: mx.array) -> np.ndarray:
    n_rows = calls[-1].keys.shape[2]
    scores = np.zeros((calls[0].keys.shape[1], n_rows))
    for call in calls:
        found = weights(call, sinks)
        n_seen, n_new = found.shape[-1], found.shape[2]
        if method == "h2o":
            scores[:, :n_seen] += found.sum((1, 2))
        elif method == "tova":
            scores[:, :n_seen] = found[:, :, -1].sum((0, 1)) / (found.shape[0] * found.shape[1])
        elif method == "snapkv":
            scores[:, :n_seen] *= max(1 - n_new / 3, 0)
            scores[:, :n_seen] += found[:, :, -3:].sum((1, 2))
        else:
            by_query = found.reshape(found.shape[0], -1, n_seen, 1)
            scores[:, :n_seen] += leverage(by_query * np.array(call.values)[0][:, None])
    return scores


@pytest.mark.parametrize("method", SCORED)
def test_scores_are_those_of_attention_with_its_sinks(model: nn.Module, method: str) -> None:
    calls = observed_calls(model)
    vc.install(model, method, budget=200, n_sink=0, **({"recent": 0} if method == "curdkv" else {}), **SCORED[method])
    caches = make_prompt_cache(model)
    run(model, caches)
    scores = np.array(rank_scores(used_rows(caches[FULL].record.store).ranks))[0]
    expected = expected_scores(method, calls, model.layers[FULL].self_attn.sinks)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)
    without = expected_scores(method, calls, mx.full((4,), -30.0))
    assert not np.allclose(expected, without, rtol=0.05)


def test_a_ragged_batch_is_scored_with_the_sinks_too(model: nn.Module) -> None:
    vc.install(model, "h2o", budget=200, n_sink=0, grace=0)
    caches = [make_prompt_cache(model) for _ in range(2)]
    for cache, prompt in zip(caches, (CALLS[0], CALLS[2]), strict=True):
        model(mx.array([prompt]), cache=cache)
    batch = [type(one).merge([one, two]) for one, two in zip(*caches, strict=True)]
    model(mx.array([[5], [5]]), cache=batch)
    for row, cache in enumerate(caches):
        model(mx.array([[5]]), cache=cache)
        found, expected = (
            rank_scores(used_rows(one.record.store).ranks) for one in (batch[FULL].extract(row), cache[FULL])
        )
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-6)


def test_a_shared_prefill_is_scored_with_the_sinks_too(model: nn.Module) -> None:
    call = observed_calls(model)[0]
    block = shared_prefill(model, CALLS[0])
    vc.install(model, "h2o", budget=200, n_sink=0, grace=0)
    filled = block.into(make_prompt_cache(model))
    scores = np.array(rank_scores(used_rows(filled[FULL].record.store).ranks))[0]
    expected = weights(call, model.layers[FULL].self_attn.sinks).sum((1, 2))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)


def test_true_mean_attention_knows_the_sinks(model: nn.Module) -> None:
    call, sinks = observed_calls(model)[0], model.layers[FULL].self_attn.sinks
    found = true_mean_attention(call.queries[0], call.keys[0], call.scale, sinks)
    received = weights(call, sinks).mean(1).sum(1) / np.arange(25, 0, -1)
    np.testing.assert_allclose(np.array(found), received, rtol=1e-4)


def test_correlations_are_with_attention_that_has_its_sinks(model: nn.Module, tokenizer: Any) -> None:
    text = "".join(chr(token) for token in CALLS[0])
    call = observed_calls(model)[0]
    truth = true_mean_attention(call.queries[0], call.keys[0], call.scale, model.layers[FULL].self_attn.sinks)
    found = attention_correlation(
        model, tokenizer, text, {"oracle": lambda layer, keys, values: truth}, n_tokens=25, skip_last=5
    )
    np.testing.assert_allclose(found["oracle"], 1.0)


def scaled_dot_product_attention(
    *given: Any, mask: Any = None, sinks: mx.array | None = None, softcap: float | None = None
) -> mx.array:
    """An attention function that may take something into its softmax that mlx_lm's does not."""
    return base.scaled_dot_product_attention(*given, mask=mask, sinks=sinks)


class StrangeAttention(llama.Attention):
    """A llama's, which passes one more argument."""

    further: dict[str, Any]

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        projected = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (rows.reshape(*x.shape[:2], -1, 8).swapaxes(1, 2) for rows in projected)
        rows = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(queries, *rows, cache, self.scale, **{"mask": mask, **self.further})
        return self.o_proj(out.swapaxes(1, 2).reshape(x.shape))


@pytest.fixture(params=["softcap", "mask"])
def strange(request: pytest.FixtureRequest, tiny_model: Callable[..., nn.Module]) -> tuple[nn.Module, str]:
    """A model whose attention passes a term of this name."""
    made = tiny_model()
    for layer in made.layers:
        layer.self_attn.__class__ = StrangeAttention
        layer.self_attn.further = {request.param: 50.0 if request.param == "softcap" else mx.zeros((1,))}
    return made, request.param


@pytest.mark.parametrize("method", BY_ATTENTION)
@pytest.mark.parametrize("strange", ["softcap"], indirect=True)
def test_any_other_term_is_refused_by_name_when_it_would_be_scored_without(
    strange: tuple[nn.Module, str], method: str
) -> None:
    model, name = strange
    with pytest.raises(ValueError, match=f"takes '{name}' into its softmax"):
        vc.install(model, method, budget=64)
    assert "make_cache" not in model.__dict__


@pytest.mark.parametrize("method", BY_ATTENTION)
@pytest.mark.parametrize("strange", ["mask"], indirect=True)
def test_numbers_in_the_mask_are_a_term_that_can_be_scored_with(strange: tuple[nn.Module, str], method: str) -> None:
    model, _ = strange
    vc.install(model, method, budget=64)
    run(model, make_prompt_cache(model))


def test_models_with_other_terms_serve_methods_that_look_at_no_queries(strange: tuple[nn.Module, str]) -> None:
    model, _ = strange
    vc.install(model, "tova", budget=64, queries="proxy")
    run(model, make_prompt_cache(model))


def test_observers_are_told_of_other_terms(strange: tuple[nn.Module, str]) -> None:
    model, name = strange
    seen: list[ObservedAttention] = []
    with vc.observe_queries(model, seen.append):
        run(model, make_prompt_cache(model))
    assert {tuple(call.terms) for call in seen} == {(name,)}


@pytest.mark.parametrize("strange", ["softcap"], indirect=True)
def test_correlation_with_attention_that_has_other_terms_is_refused(
    strange: tuple[nn.Module, str], tokenizer: Any
) -> None:
    model, name = strange
    with pytest.raises(ValueError, match=f"takes '{name}' into its softmax"):
        attention_correlation(model, tokenizer, "x" * 99, {}, n_tokens=99)

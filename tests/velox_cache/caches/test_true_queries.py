"""True queries reach the caches end to end: from the model's attention through the tap into the scores."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from velox_cache import MissingQueriesError, install, observe_queries, uninstall
from velox_fn import curdkv, kept_positions
from velox_fn.registry import METHODS

TOKENS = [(7 * i * i + 3 * i) % 97 for i in range(60)]
BY_ATTENTION = [name for name, factory in METHODS.items() if factory(budget=64).needs_queries]


@pytest.fixture
def model(tiny_model):
    """A random llama whose query heads share KV heads two by two."""
    made = tiny_model()
    yield made
    uninstall(made)


def run(model, caches, calls=(TOKENS,)):
    outputs = [model(mx.array([list(tokens)]), cache=caches) for tokens in calls]
    mx.eval(outputs)
    return outputs


def attention_calls(model, calls):
    """What attention of each layer saw in each call, under plain caches."""
    seen, caches = [], make_prompt_cache(model)
    with observe_queries(model, seen.append):
        run(model, caches, calls)
    return [seen[layer :: len(model.layers)] for layer in range(len(model.layers))]


def test_kept_rows_are_those_of_the_method_given_the_models_queries(model):
    install(model, "curdkv", budget=16, n_sink=2, recent=0)
    caches = model.make_cache()
    run(model, caches)
    for layer, (call,) in enumerate(attention_calls(model, [TOKENS])):
        method = curdkv(budget=16, n_sink=2)
        assert call.queries.shape[1] == 2 * call.keys.shape[1]
        state, _ = method.update(method.init(1, 2, 8), call.keys, call.values, queries=call.queries)
        assert mx.array_equal(kept_positions(caches[layer].record), kept_positions(state)).item()


def test_true_queries_choose_other_rows_than_keys_do(model):
    chosen = []
    for queries in ("true", "proxy"):
        install(model, "curdkv", budget=16, n_sink=2, recent=0, queries=queries)
        caches = model.make_cache()
        run(model, caches)
        chosen.append(np.array(kept_positions(caches[0].record)).tolist())
    assert chosen[0] != chosen[1]


def test_scale_is_the_one_that_attention_uses(tiny_model):
    # gemma3's query_pre_attn_scalar makes it differ from 1/sqrt(head_dim); its second layer here is a full one.
    model = tiny_model("gemma3_text", query_pre_attn_scalar=128, sliding_window=64)
    install(model, "h2o", budget=16, n_sink=2, grace=0)
    caches = model.make_cache()
    run(model, caches)
    (full,) = [cache for cache in caches if getattr(cache, "method", None) is not None]
    (call,) = attention_calls(model, [TOKENS])[caches.index(full)]
    uninstall(model)
    weights = mx.softmax(
        mx.where(
            mx.tri(60, dtype=mx.bool_), 128**-0.5 * call.queries @ mx.repeat(call.keys, 2, 1).swapaxes(-1, -2), -1e9
        ),
        axis=-1,
    )
    mass = np.array(weights.sum(2).reshape(2, 2, 60).sum(1))
    for head in range(2):
        best = [0, 1, *sorted(range(2, 60), key=lambda p: -mass[head, p])[:14]]
        assert np.array(kept_positions(full.record))[0, head].tolist() == sorted(best)


@pytest.mark.parametrize("method", BY_ATTENTION)
def test_outputs_are_bit_identical_to_the_full_cache_under_budget(model, method):
    calls = [TOKENS[:40], TOKENS[40:41], TOKENS[41:50], TOKENS[50:51]]
    plain = run(model, make_prompt_cache(model), calls)
    install(model, method, budget=64)
    bounded = run(model, model.make_cache(), calls)
    assert all(mx.array_equal(a, b).item() for a, b in zip(plain, bounded, strict=True))


@pytest.mark.parametrize("method", BY_ATTENTION)
def test_logits_of_the_first_block_are_those_of_the_full_cache_over_budget(model, method):
    (plain,) = run(model, make_prompt_cache(model))
    install(model, method, budget=40)
    (bounded,) = run(model, model.make_cache())
    assert mx.array_equal(plain, bounded).item()


@pytest.mark.parametrize("method", BY_ATTENTION)
def test_rows_stay_bounded_through_generation(model, method):
    install(model, method, budget=40)
    caches = model.make_cache()
    tokens = [token for token, _ in generate_step(mx.array(TOKENS), model, max_tokens=6, prompt_cache=caches)]
    assert len(tokens) == 6
    assert [(cache.size(), cache.offset) for cache in caches] == [(40, 66)] * 2


def test_a_tap_that_was_removed_is_an_error_that_says_so(model):
    install(model, "curdkv", budget=16)
    caches = model.make_cache()
    uninstall(model)
    run(model, caches)
    with pytest.raises(MissingQueriesError, match="the query tap is not installed"):
        run(model, caches, [[1]])


def test_a_call_that_an_exception_cut_short_is_named_as_a_cause(model, monkeypatch):
    install(model, "curdkv", budget=16)
    caches = model.make_cache()
    monkeypatch.setattr(model.layers[0].self_attn, "scale", "not a number")
    with pytest.raises(TypeError):
        run(model, caches)
    monkeypatch.undo()
    with pytest.raises(MissingQueriesError, match="an exception cut the model's call short"):
        run(model, caches)


def test_a_deep_copy_of_a_model_sees_its_queries_when_the_original_is_uninstalled(model):
    install(model, "curdkv", budget=16)
    twin = copy.deepcopy(model)
    uninstall(model)
    caches = twin.make_cache()
    run(twin, caches)
    run(twin, caches, [[1]])
    assert caches[0].size() == 16
    uninstall(twin)


def test_reading_the_state_without_a_tap_is_that_error_too(model):
    install(model, "curdkv", budget=16)
    caches = model.make_cache()
    uninstall(model)
    run(model, caches)
    with pytest.raises(MissingQueriesError, match="queries='proxy'"):
        _ = caches[0].state


def test_proxy_caches_need_no_tap(model):
    install(model, "curdkv", budget=16, queries="proxy")
    caches = model.make_cache()
    uninstall(model)
    run(model, caches, [TOKENS, [1]])
    assert caches[0].size() == 16


def test_an_outer_observer_does_not_disturb_the_caches(model):
    install(model, "curdkv", budget=16)
    alone, watched, seen = model.make_cache(), model.make_cache(), []
    run(model, alone, [TOKENS, [1]])
    with observe_queries(model, seen.append, caches=watched):
        run(model, watched, [TOKENS, [1]])
    assert len(seen) == 4
    assert mx.array_equal(kept_positions(alone[1].record), kept_positions(watched[1].record)).item()


def test_every_array_of_the_state_is_evaluated_with_the_logits(model):
    # An array that no token depends on would keep a graph that grows with every call.
    install(model, "curdkv", budget=16)
    caches = model.make_cache()
    run(model, caches)
    before = mx.get_active_memory()
    for _ in range(300):
        run(model, caches, [[1]])
    assert mx.get_active_memory() < before + 200_000


@pytest.mark.real_model
def test_smollm2_is_bit_identical_under_budget_and_bounded_over_it(smollm2):
    model, tokenizer = smollm2
    tokens = tokenizer.encode("The three primary colours are red, yellow and blue. " * 12)[:104]
    calls = [tokens[:100], *[[token] for token in tokens[100:]]]
    plain = run(model, make_prompt_cache(model), calls)
    try:
        install(model, "curdkv", budget=160)
        wide = run(model, model.make_cache(), calls)
        install(model, "curdkv", budget=48)
        narrow = model.make_cache()
        run(model, narrow, calls)
    finally:
        uninstall(model)
    assert all(mx.array_equal(a, b).item() for a, b in zip(plain, wide, strict=True))
    assert {(cache.size(), cache.offset) for cache in narrow} == {(48, 104)}


@pytest.mark.real_model
def test_smollm2_scores_its_rows_by_its_own_queries(smollm2):
    model, tokenizer = smollm2
    tokens = tokenizer.encode("The three primary colours are red, yellow and blue. " * 12)[:104]
    try:
        install(model, "curdkv", budget=48, recent=0)
        caches = model.make_cache()
        run(model, caches, [tokens])
    finally:
        uninstall(model)
    for layer in (0, 15, 29):
        (call,) = attention_calls(model, [tokens])[layer]
        method = curdkv(budget=48)
        state, _ = method.update(method.init(1, 3, 64), call.keys, call.values, queries=call.queries)
        assert mx.array_equal(kept_positions(caches[layer].record), kept_positions(state)).item()

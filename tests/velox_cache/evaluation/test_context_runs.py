"""Contexts under many caches, against the model by itself and numpy."""

import mlx.core as mx
import numpy as np
import pytest
from letters import Letters
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.evaluation.ceilings import caches_by_scores
from velox_cache.evaluation.compare import Contender
from velox_cache.evaluation.context_runs import (
    ReadContext,
    answered,
    continued,
    forked,
    margin,
    model_digest,
    rows_on_disk,
    run_aware,
    run_context,
)
from velox_cache.evaluation.contexts import AskedQuestion, Context
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.harness.shared_prefill import shared_prefill
from velox_cache.introspection.attention_over import attention_over
from velox_cache.introspection.observed_prefill import LayerQueries
from velox_cache.introspection.query_tap import observe_queries
from velox_fn.engine.eviction import kept_positions

TOKENS = tuple(int(token) for token in np.random.default_rng(0).integers(97, size=90))
QUESTION = AskedQuestion("needle", (5, 6, 7), ((1, 2), (3, 4), (8, 9), (10, 11)))
CONTEXT = Context("prose", "choice", 0, TOKENS, tuple(range(20, 32)), (QUESTION,))
ARMS = [FULL, Arm("s", "streaming_llm", {"budget": 24}), Arm("h", "h2o", {"budget": 24, "grace": 6})]


@pytest.fixture(params=["llama", "gemma3_text"])
def model(request, tiny_model):
    return tiny_model(request.param)


def contenders(model, *more):
    return [Contender(arm, cache_maker(model, arm)) for arm in (*ARMS, *more)]


def logprobs_alone(model, tokens):
    """Log-probabilities float64 [N,V] of a plain pass over all tokens."""
    logits = np.array(model(mx.array([list(tokens)]), cache=make_prompt_cache(model)))[0].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def test_rows_from_disk_equal_those_of_the_plain_cache(model, tmp_path):
    caches = make_prompt_cache(model)
    for at in range(0, len(TOKENS), 32):
        model(mx.array([list(TOKENS[at : at + 32])]), cache=caches)
    for _ in range(2):  # written, then found
        rows = rows_on_disk(model, TOKENS, tmp_path / "rows", 32)
        for own, plain in zip(rows.caches, caches, strict=True):
            n_rows = min(len(TOKENS), own.keys.shape[2])
            np.testing.assert_array_equal(np.array(own.keys[:, :, :n_rows]), np.array(plain.keys[:, :, :n_rows]))
            np.testing.assert_array_equal(np.array(own.values[:, :, :n_rows]), np.array(plain.values[:, :, :n_rows]))


def test_rows_on_disk_are_not_read_by_the_model_again(tiny_model, tmp_path):
    model, done = tiny_model(), []
    rows_on_disk(model, TOKENS, tmp_path / "rows", 32)
    model.layers.clear()  # any call would fail now
    assert rows_on_disk(model, TOKENS, tmp_path / "rows", 32, done.append).n_tokens == len(TOKENS)
    assert done == [len(TOKENS)]


def test_blocks_keep_the_rows_that_a_cache_fed_in_blocks_keeps(tiny_model):
    model = tiny_model(num_hidden_layers=1)  # whose rows do not depend on what was evicted
    arm = Arm("h", "h2o", {"budget": 24, "grace": 6})
    found = shared_prefill(model, TOKENS, block=32).into(cache_maker(model, arm)(), block=32)
    alone = cache_maker(model, arm)()
    with observe_queries(model):
        for at in range(0, len(TOKENS), 32):
            mx.eval(model(mx.array([list(TOKENS[at : at + 32])]), cache=alone))
    assert kept_positions(found[0].record).tolist() == kept_positions(alone[0].record).tolist()
    at_once = shared_prefill(model, TOKENS).into(cache_maker(model, arm)())
    assert kept_positions(found[0].record).tolist() != kept_positions(at_once[0].record).tolist()


def test_other_weights_have_another_digest(tiny_model):
    assert model_digest(tiny_model(seed=0)) == model_digest(tiny_model(seed=0))
    assert model_digest(tiny_model(seed=0)) != model_digest(tiny_model(seed=1))


def test_the_full_cache_answers_as_the_model_does(model, tmp_path):
    read = ReadContext(model, None, CONTEXT, tmp_path, block=32)
    [found] = answered(model, [read.caches(contenders(model)[0])], QUESTION.tokens, QUESTION.answers)
    for answer, logprob in zip(QUESTION.answers, found["logprobs"], strict=True):
        alone = logprobs_alone(model, (*TOKENS, *QUESTION.tokens, *answer))
        at = len(TOKENS) + len(QUESTION.tokens) - 1
        assert logprob == pytest.approx(sum(alone[at + i, token] for i, token in enumerate(answer)), abs=2e-3)
    greedy = [int(alone[at + i].argmax()) for i in range(2)]
    assert found["greedy"] == (greedy == list(QUESTION.answers[0]))


def test_forks_do_not_disturb_each_other(model, tmp_path):
    read = ReadContext(model, None, CONTEXT, tmp_path, block=32)
    caches = [read.caches(one) for one in contenders(model)]
    first = answered(model, caches, QUESTION.tokens, QUESTION.answers)
    continued(model, [forked(cache) for cache in caches], CONTEXT.continuation)
    answered(model, caches, (50, 51), ((1, 2), (3, 4)))
    assert answered(model, caches, QUESTION.tokens, QUESTION.answers) == first
    assert all(cache.offset == len(TOKENS) for prompt_cache in caches for cache in prompt_cache)


def test_the_continuation_is_compared_token_by_token(model, tmp_path):
    read = ReadContext(model, None, CONTEXT, tmp_path, block=32)
    full, other, _ = (read.caches(one) for one in contenders(model))
    divergences, same = continued(model, [full, other], CONTEXT.continuation)
    assert divergences.shape == same.shape == (2, len(CONTEXT.continuation) - 1)
    np.testing.assert_allclose(divergences[0], 0, atol=1e-6)
    assert divergences[1].mean() > 1e-5


def test_arms_that_see_the_question_keep_other_rows_for_it(tiny_model, tmp_path):
    model = tiny_model()
    read = ReadContext(model, None, CONTEXT, tmp_path, block=32)
    ready = contenders(model)
    before = [read.caches(one, stop=read.last_block) for one in ready]
    seen = read.caches_that_saw(QUESTION, before)
    assert [cache.tokens_seen for cache in seen[2]] == [len(TOKENS) + 2] * 2
    assert [cache.tokens_seen for cache in before[2]] == [64] * 2
    later, aware = run_context(read, ready, lambda n: None), run_aware(read, ready, lambda n: None)
    np.testing.assert_allclose(later[0]["answers"][0]["logprobs"], aware[0]["answers"][0]["logprobs"], atol=2e-3)
    assert later[2]["answers"][0]["logprobs"] != aware[2]["answers"][0]["logprobs"]


@pytest.mark.parametrize("name", ["oracle", "repeat"])
def test_ceilings_run_beside_methods_at_equal_rows(tiny_model, tmp_path, name):
    model = tiny_model()
    read = ReadContext(model, Letters(), CONTEXT, tmp_path, block=32)
    ceiling = Contender(Arm(name, name, {"budget": 24, "recent": 6}), list, "1/4")
    found = run_context(read, [*contenders(model), ceiling], lambda n: None)
    assert len(found) == 4
    assert found[3]["kl_divergence"] > 0


def test_scores_decide_what_a_ceiling_keeps(tiny_model):
    model = tiny_model()
    scores = {layer: mx.random.normal((2, len(TOKENS)), key=mx.random.key(layer)) for layer in range(2)}
    caches = shared_prefill(model, TOKENS).into(caches_by_scores(model, scores, budget=20, recent=5))
    for layer, cache in enumerate(caches):
        assert isinstance(cache, EvictingKVCache)
        for head, kept in enumerate(kept_positions(cache.record)[0].tolist()):
            sure = [*range(4), *range(85, 90)]
            order = np.argsort(-np.array(scores[layer][head]), kind="stable")
            others = [int(i) for i in order if i not in sure][: 20 - len(sure)]
            assert kept == sorted(sure + others)


@pytest.mark.parametrize("sinks", [False, True])
def test_future_attention_is_the_softmax_over_all_rows(sinks):
    rng = np.random.default_rng(1)
    keys, values = (rng.normal(size=(1, 2, 12, 8)).astype(np.float32) for _ in range(2))
    queries = rng.normal(size=(1, 4, 3, 8)).astype(np.float32)
    beside = rng.normal(size=4).astype(np.float32)
    terms = {"sinks": mx.array(beside)} if sinks else {}
    call = LayerQueries(0, mx.array(queries), mx.array(keys), mx.array(values), 0.5, terms)
    found = np.array(attention_over(call, mx.arange(9)))
    for head in range(4):
        for s in range(3):
            logits = 0.5 * queries[0, head, s].astype(np.float64) @ keys[0, head // 2, : 9 + s + 1].T
            weights = np.exp(logits)
            total = weights.sum() + (np.exp(beside[head]) if sinks else 0)
            np.testing.assert_allclose(found[head // 2, head % 2, s], (weights / total)[:9], atol=1e-5)


def test_the_margin_is_to_the_likeliest_wrong_answer():
    assert margin([-1.0, -4.0, -1.5, -9.0]) == 0.5
    assert margin([-3.0, -2.0, -8.0, -9.0]) == -1.0


def test_a_context_in_one_block_may_see_the_question_too(tiny_model, tmp_path):
    model = tiny_model()
    read = ReadContext(model, None, CONTEXT, tmp_path, block=0)
    assert read.last_block == 0
    whole = ReadContext(model, None, CONTEXT, tmp_path, block=len(TOKENS))
    assert run_aware(read, contenders(model), lambda n: None) == run_aware(whole, contenders(model), lambda n: None)

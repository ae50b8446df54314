"""A filled cache cut down by what the model needs to repeat its context, against numpy."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from letters import Letters
from mlx_lm.models.cache import make_prompt_cache

import velox_cache
from velox_cache.compression import repeating
from velox_cache.compression.repeating import repeat_scores
from velox_cache.introspection.query_tap import observe_queries
from velox_fn import kept_positions, kv

CONTEXT = np.random.default_rng(2).integers(2, 97, 50).tolist()
LETTERS = Letters()
CHUNK, BUDGET, N_SINK = 20, 18, 3
REQUESTS = {
    0: LETTERS.encode("\n\nRepeat the previous context exactly.", False),
    20: LETTERS.encode("\n\nRepeat the part of the previous context exactly, starting with ", False) + CONTEXT[12:20],
    40: LETTERS.encode("\n\nRepeat the part of the previous context exactly, starting with ", False) + CONTEXT[32:40],
}


def read(model, tokens=CONTEXT):
    caches = make_prompt_cache(model)
    model(mx.array([tokens]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def oracle(model, ending):
    """By layer: scores [H,N] of the context's rows."""
    found = {layer: [] for layer in range(2)}
    for start, request in REQUESTS.items():
        chunk = CONTEXT[start : start + CHUNK]
        tokens, caches, calls = [*request, *ending, *chunk], read(model), []
        with observe_queries(model, calls.append, caches=caches):
            model(mx.array([tokens]), cache=caches)
        for layer, call in enumerate(calls):
            queries, keys = (np.array(part[0], np.float64) for part in (call.queries, call.keys))
            first = N_SINK if start else 0
            before = [*range(first), *range(start, start + len(chunk))]
            most = np.zeros((2, len(before)))
            for head in range(4):
                for i, query in enumerate(queries[head]):
                    at = [*before, *range(50, 50 + i + 1)]
                    weights = np.exp(keys[head // 2, at] @ query * call.scale)
                    most[head // 2] = np.maximum(most[head // 2], (weights / weights.sum())[: len(before)])
            found[layer].append(most[:, first:])
    return {layer: np.concatenate(parts, axis=1) for layer, parts in found.items()}


@pytest.mark.parametrize("template", [False, True])
def test_scores_are_the_most_attention_while_the_context_is_repeated(tiny_model, template, monkeypatch):
    monkeypatch.setattr(repeating, "_QUERIES", 16)  # so that the weights of several lots are compared
    model, letters = tiny_model(), Letters(has_chat_template=template)
    ending = letters.encode("</user><assistant>" if template else "\n", False)
    found = repeat_scores(model, letters, read(model), CONTEXT, n_sink=N_SINK, chunk=CHUNK)
    for layer, expected in oracle(model, ending).items():
        np.testing.assert_allclose(np.array(found[layer]), expected, rtol=2e-4)


def compressed(model, caches, **changes):
    given = {"context": CONTEXT, "budget": BUDGET, "n_sink": N_SINK, "chunk": CHUNK} | changes
    return velox_cache.compress(model, LETTERS, caches=caches, **given)


def test_each_head_keeps_the_rows_that_were_needed_most_as_they_were(tiny_model):
    model = tiny_model()
    caches = read(model)
    before = [(np.array(cache.keys), cache.offset) for cache in caches]
    found = compressed(model, caches)
    for layer, scores in oracle(model, LETTERS.encode("\n", False)).items():
        cache = found[layer]
        assert (cache.tokens_seen, cache.size()) == (50, BUDGET)
        for head in range(2):
            rest = sorted(range(N_SINK, 50), key=lambda at, of=scores[head]: -of[at])[: BUDGET - N_SINK]
            assert kept_positions(cache.record)[0, head].tolist() == sorted([*range(N_SINK), *rest])
        for kept, given in zip(kv(cache.record), (caches[layer].keys, caches[layer].values), strict=True):
            at = kept_positions(cache.record)[..., None]
            assert mx.array_equal(kept, mx.take_along_axis(given[..., :50, :], at, axis=2))
    for cache, (keys, offset) in zip(caches, before, strict=True):
        assert cache.offset == offset
        np.testing.assert_array_equal(np.array(cache.keys), keys)


def test_a_budget_of_all_rows_changes_nothing(tiny_model):
    model = tiny_model()
    caches = read(model)
    found = compressed(model, caches, budget=80)
    following = mx.array([[5, 6, 7, 8]])
    np.testing.assert_array_equal(np.array(model(following, cache=found)), np.array(model(following, cache=caches)))


def test_a_context_that_is_not_read_yet_is_read(tiny_model):
    model = tiny_model()
    for one, other in zip(compressed(model, None), compressed(model, read(model)), strict=True):
        np.testing.assert_array_equal(np.array(kept_positions(one.record)), np.array(kept_positions(other.record)))


def test_numbers_may_be_numpys(tiny_model):
    model = tiny_model()
    expected = compressed(model, read(model))
    counts = {"budget": np.int64(BUDGET), "n_sink": np.int64(N_SINK), "chunk": np.int64(CHUNK)}
    found = compressed(model, read(model), context=np.array(CONTEXT), **counts)
    for one, other in zip(expected, found, strict=True):
        assert mx.array_equal(kept_positions(one.record), kept_positions(other.record)).item()


def test_what_follows_takes_the_place_of_what_was_needed_least(tiny_model):
    model = tiny_model()
    scores = oracle(model, LETTERS.encode("\n", False))
    found = compressed(model, read(model))
    for token in range(5, 12):
        model(mx.array([[token]]), cache=found)
    for layer, cache in enumerate(found):
        for head in range(2):
            order = sorted(range(N_SINK, 50), key=lambda at, of=scores[layer][head]: -of[at])
            context = sorted([*range(N_SINK), *order[: BUDGET - N_SINK - 7]])
            assert kept_positions(cache.record)[0, head].tolist() == [*context, *range(50, 57)]


def test_it_forks_and_its_file_goes_on(tiny_model, tmp_path):
    model = tiny_model()
    found = compressed(model, read(model))
    velox_cache.save_prompt_cache(tmp_path / "small", found)
    one, other = copy.deepcopy(found), velox_cache.load_prompt_cache(tmp_path / "small")
    model(mx.array([[9, 9, 9]]), cache=copy.deepcopy(found))
    following = mx.array([[5, 6, 7]])
    np.testing.assert_array_equal(np.array(model(following, cache=one)), np.array(model(following, cache=other)))


def test_layers_that_bound_themselves_are_copied(tiny_model):
    model = tiny_model("gemma3_text", num_hidden_layers=4)
    caches = read(model)
    found = compressed(model, caches)
    kinds = [type(cache).__name__ for cache in found]
    assert set(kinds) == {"RotatingKVCache", "EvictingKVCache"}
    model(mx.array([[5, 6]]), cache=found)
    assert all(cache.offset == 50 for cache in caches)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 0}, "budget must be"),
        ({"budget": 2.5}, "budget must be"),
        ({"budget": 3}, "must be smaller than budget"),
        ({"chunk": 0}, "chunk must be"),
        ({"n_sink": -1}, "n_sink must be"),
        ({"context": None}, "context must be a list of whole numbers"),
        ({"context": [CONTEXT]}, r"context\[0\] must be a whole number"),
    ],
)
def test_counts_that_cannot_work_are_refused(tiny_model, changes, words):
    model = tiny_model()
    with pytest.raises(ValueError, match=words):
        compressed(model, read(model), **changes)


def test_caches_of_another_context_are_refused(tiny_model):
    model = tiny_model()
    caches = read(model)
    for context, words in (
        (CONTEXT[:-1], "has read 50 tokens and the context has 49"),
        ([*CONTEXT, 5], "has read 50 tokens and the context has 51"),
        ([], "context is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            velox_cache.compress(model, LETTERS, context, caches=caches, budget=BUDGET)
    with pytest.raises(ValueError, match="whole prompt cache"):
        velox_cache.compress(model, LETTERS, CONTEXT, caches=caches[:1], budget=BUDGET)
    with pytest.raises(ValueError, match="has read 50 tokens and the context has 7"):
        velox_cache.compress(model, LETTERS, "a text", caches=caches, budget=BUDGET)


def test_caches_that_evict_already_are_refused(tiny_model):
    model = tiny_model()
    velox_cache.install(model, "l2norm", budget=24)
    with pytest.raises(ValueError, match="uninstall"):
        compressed(model, read(model))


def test_numbers_added_to_the_logits_are_refused(tiny_model):
    model = tiny_model("deepseek_v3")
    with pytest.raises(ValueError, match="mask"):
        compressed(model, read(model))


def test_a_model_with_learned_sinks_is_compressed(tiny_model):
    model = tiny_model("gpt_oss")
    bounded = [cache for cache in compressed(model, read(model)) if isinstance(cache, velox_cache.EvictingKVCache)]
    assert bounded
    assert {cache.size() for cache in bounded} == {BUDGET}

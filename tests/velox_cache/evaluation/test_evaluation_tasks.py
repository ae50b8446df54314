"""Tasks: what they ask, where the evidence stands, how replies are scored, and how cells are verified."""

import random
import re

import pytest
from letters import Letters

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.evaluation.task_runs import (
    check_equal_rows,
    evidence_kept,
    is_discriminative,
    run_task,
    seeded_prompt,
)
from velox_cache.evaluation.tasks import TASKS
from velox_cache.evaluation.tasks.task import TaskPrompt, inserted, make_prompt, score_reply
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.harness.shared_prefill import shared_prefill

FILLER = " ".join(f"Sentence number {i} says little." for i in range(200))


def a_prompt(name: str, seed: int) -> TaskPrompt:
    return TASKS[name](random.Random(seed), FILLER)


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_makes_the_same_prompt(name):
    assert a_prompt(name, 3) == a_prompt(name, 3)
    assert a_prompt(name, 3) != a_prompt(name, 4)


@pytest.mark.parametrize("name", TASKS)
def test_the_evidence_stands_in_the_text(name):
    for seed in range(20):
        prompt = a_prompt(name, seed)
        assert all(passage in prompt.text for passage in prompt.evidence)


@pytest.mark.parametrize("name", TASKS)
def test_the_answers_are_in_the_evidence_and_not_in_the_question(name):
    for seed in range(20):
        prompt = a_prompt(name, seed)
        question = prompt.text.rsplit("\n\n", 1)[1] + " " + prompt.reply_start
        assert score_reply(prompt, " ".join(prompt.evidence)) == 1
        assert score_reply(prompt, question) == 0


def test_needles_are_found_by_their_question():
    prompt = a_prompt("needle", 7)
    place = re.search(r"code word of the (\w+)\?", prompt.text).group(1)
    assert re.findall(rf"code word of the {place} is (\w+)\.", prompt.text) == list(prompt.answers)


def test_a_multi_key_needle_has_one_right_answer_among_four():
    prompt = a_prompt("needle_multi_key", 7)
    facts = dict(re.findall(r"code word of the (\w+) is (\w+)\.", prompt.text))
    asked = re.search(r"code word of the (\w+)\?", prompt.text).group(1)
    assert len(facts) == 4
    assert (facts[asked],) == prompt.answers
    assert prompt.floor == 1 / 4


def test_variables_are_those_that_the_assignments_lead_to():
    prompt = a_prompt("variable_tracking", 7)
    number = re.search(r"hold (\d+)", prompt.text).group(1)
    held = {}
    for name, value in re.findall(r"VAR (\w+) = (\w+)", prompt.text):
        held[name] = held.get(value, value)
    assert sorted(name for name, value in held.items() if value == number) == sorted(prompt.answers)
    assert len(held) == 8


@pytest.mark.parametrize("name", ["common_words", "frequent_words"])
def test_counted_words_are_the_most_frequent(name):
    prompt = a_prompt(name, 7)
    words = prompt.evidence[0].split()
    by_count = sorted(set(words), key=words.count, reverse=True)
    assert set(by_count[:3]) == set(prompt.answers)
    assert words.count(by_count[2]) > words.count(by_count[3])


def test_the_second_hop_needs_the_first():
    prompt = a_prompt("two_hop", 7)
    person = re.search(r"city where (\w+) lives", prompt.text).group(1)
    city = re.search(rf"{person} lives in (\w+)\.", prompt.text).group(1)
    assert re.findall(rf"The symbol of {city} is the (\w+)\.", prompt.text) == list(prompt.answers)


def test_passages_stand_at_their_depths():
    filler = "One. Two. Three. Four."
    assert inserted(filler, ["A", "B", "C"], [0, 0.5, 1]).split() == ["A", "One.", "Two.", "B", "Three.", "Four.", "C"]


PROMPT = TaskPrompt("text", "", ("apple", "pear"), (), 0.0)


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Apple, PEAR.", 1), ("a pear", 0.5), ("pineapple pears", 0), ("", 0), ("pear pear", 0.5)],
)
def test_a_reply_scores_the_share_of_answers_it_holds_as_words(reply, score):
    assert score_reply(PROMPT, reply) == score


@pytest.mark.parametrize("templated", [False, True])
def test_evidence_is_found_in_tokens(templated):
    tokenizer, prompt = Letters(templated), a_prompt("two_hop", 2)
    encoded = make_prompt(tokenizer, prompt)
    text = tokenizer.decode(list(encoded.tokens))
    for passage, (start, stop) in zip(prompt.evidence, encoded.evidence, strict=True):
        expected = tokenizer.decode(tokenizer.encode(passage))
        assert expected in tokenizer.decode(list(encoded.tokens[start:stop]))
        assert stop - start <= len(passage) + 2
    assert text.endswith(tokenizer.decode(tokenizer.encode(prompt.reply_start)))


def test_a_needle_inside_the_kept_set_counts_as_kept(tiny_model):
    model, tokens = tiny_model(), list(range(60))
    caches = shared_prefill(model, tokens).into(
        cache_maker(model, Arm("s", "streaming_llm", {"budget": 24, "n_sink": 4}))()
    )
    assert evidence_kept(caches, [(0, 4)]) == 1  # sinks
    assert evidence_kept(caches, [(40, 60)]) == 1  # the last twenty
    assert evidence_kept(caches, [(10, 30)]) == 0  # gone
    assert evidence_kept(caches, [(38, 42)]) == 0.5  # half of it
    assert evidence_kept(caches, [(10, 20), (50, 60)]) == 0.5


def test_the_full_cache_keeps_all_evidence(tiny_model):
    model = tiny_model()
    assert evidence_kept(shared_prefill(model, [1, 2, 3]).into(cache_maker(model, FULL)()), [(0, 3)]) == 1


def filled(model, arm, n_tokens=60):
    return shared_prefill(model, list(range(n_tokens))).into(cache_maker(model, arm)())


def test_equal_budgets_pass(tiny_model):
    model = tiny_model()
    arms = [FULL, Arm("s", "streaming_llm", {"budget": 24}), Arm("h", "h2o", {"budget": 24})]
    check_equal_rows(arms, [filled(model, arm) for arm in arms])


def test_an_arm_that_keeps_more_than_its_budget_is_refused(tiny_model):
    model = tiny_model()
    greedy, honest = Arm("greedy", "streaming_llm", {"budget": 32}), Arm("honest", "streaming_llm", {"budget": 24})
    caches = [filled(model, honest), filled(model, greedy)]
    with pytest.raises(ValueError, match="not be those of its budget"):
        check_equal_rows([honest, Arm("greedy", "streaming_llm", {"budget": 24})], caches)


def test_arms_that_saw_different_prompts_are_refused(tiny_model):
    model = tiny_model()
    arms = [Arm("a", "streaming_llm", {"budget": 24}), Arm("b", "l2norm", {"budget": 24})]
    with pytest.raises(ValueError, match="equal rows"):
        check_equal_rows(arms, [filled(model, arms[0]), filled(model, arms[1], 50)])


@pytest.mark.parametrize(
    ("scores", "floor", "expected"), [([1, 0], 0.0, True), ([0, 0, 1], 0.25, False), ([0.5], 0.25, False)]
)
def test_a_task_compares_caches_when_the_full_cache_beats_guessing(scores, floor, expected):
    assert is_discriminative(scores, [floor] * len(scores)) is expected


def test_a_task_run_replies_alike_from_equal_caches(tiny_model):
    model, tokenizer = tiny_model(), Letters()
    prompt = seeded_prompt(tokenizer, TASKS["needle"], FILLER, n_filler=100, seed=1)
    arms = [FULL, Arm("wide", "l2norm", {"budget": 4096}), Arm("narrow", "l2norm", {"budget": 16})]
    full, wide, narrow = run_task(model, tokenizer, prompt, arms, [cache_maker(model, arm) for arm in arms], n_reply=8)
    assert full.reply == wide.reply
    assert (full.score, full.evidence_kept, full.usage.rows_kept) == (wide.score, 1, full.prompt_tokens - 1)
    assert (narrow.usage.rows_kept, narrow.prompt_tokens) == (16, full.prompt_tokens)
    assert narrow.evidence_kept < 1


def test_too_short_a_filler_is_refused():
    with pytest.raises(ValueError, match="give more text"):
        seeded_prompt(Letters(), TASKS["needle"], "short", n_filler=100, seed=0)


def test_bounded_caches_are_what_is_verified(tiny_model):
    model = tiny_model("gemma3_text")
    caches = filled(model, Arm("s", "streaming_llm", {"budget": 24}))
    assert [cache.tokens_kept for cache in caches if isinstance(cache, EvictingKVCache)] == [24]

"""A prompt with one question under many caches: where the evidence stands, how replies score, and equal rows."""

import pytest
from letters import Letters

from velox_cache import install, uninstall
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.evaluation.prompt import TaskPrompt, inserted, make_prompt, score_reply
from velox_cache.evaluation.task_runs import check_equal_rows, evidence_kept, run_task
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.harness.shared_prefill import shared_prefill

FACT, OTHER = "The code word is pear.", "The other word is apple."
FILLER = " ".join(f"Sentence number {i} says little." for i in range(4))
PROMPT = TaskPrompt(
    f"{inserted(FILLER, [FACT, OTHER], [0.3, 0.7])}\n\nWhich?", "It is", ("apple", "pear"), (FACT, OTHER)
)


def test_passages_stand_at_their_depths():
    filler = "One. Two. Three. Four."
    assert inserted(filler, ["A", "B", "C"], [0, 0.5, 1]).split() == ["A", "One.", "Two.", "B", "Three.", "Four.", "C"]


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Apple, PEAR.", 1), ("a pear", 0.5), ("pineapple pears", 0), ("", 0), ("pear pear", 0.5)],
)
def test_a_reply_scores_the_share_of_answers_it_holds_as_words(reply, score):
    assert score_reply(PROMPT, reply) == score


@pytest.mark.parametrize("templated", [False, True])
def test_evidence_is_found_in_tokens(templated):
    tokenizer, prompt = Letters(templated), PROMPT
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


def test_layers_may_share_a_budget(tiny_model):
    model = tiny_model()
    arms = [Arm("alike", "l2norm", {"budget": 24}), Arm("pyramid", "l2norm", {"budget": 24, "shares": "pyramid"})]
    caches = [filled(model, arm) for arm in arms]
    assert len({cache.tokens_kept for cache in caches[1]}) == 2
    check_equal_rows(arms, caches)


def test_heads_that_have_room_keep_fewer_than_the_budget(tiny_model):
    model, arm = tiny_model(), Arm("heads", "l2norm", {"budget": 40})
    install(model, "l2norm", budget=[[70, 10], [10, 70]])
    make = model.make_cache
    uninstall(model)
    check_equal_rows([arm], [shared_prefill(model, list(range(60))).into(make())])
    with pytest.raises(ValueError, match="not be those of its budget"):
        check_equal_rows(
            [Arm("fewer", "l2norm", {"budget": 41})], [shared_prefill(model, list(range(60))).into(make())]
        )


def test_an_arm_that_keeps_more_than_its_budget_is_refused(tiny_model):
    model = tiny_model()
    greedy, honest = Arm("greedy", "streaming_llm", {"budget": 32}), Arm("honest", "streaming_llm", {"budget": 24})
    caches = [filled(model, honest), filled(model, greedy)]
    with pytest.raises(ValueError, match="not be those of its budget"):
        check_equal_rows([honest, Arm("greedy", "streaming_llm", {"budget": 24})], caches)


def test_arms_that_saw_different_prompts_are_refused(tiny_model):
    model = tiny_model()
    arms = [Arm("a", "streaming_llm", {"budget": 24}), Arm("b", "l2norm", {"budget": 24})]
    with pytest.raises(ValueError, match="the same tokens"):
        check_equal_rows(arms, [filled(model, arms[0]), filled(model, arms[1], 50)])


def test_a_task_run_replies_alike_from_equal_caches(tiny_model):
    model, tokenizer = tiny_model(), Letters()
    arms = [FULL, Arm("wide", "l2norm", {"budget": 4096}), Arm("narrow", "l2norm", {"budget": 16})]
    full, wide, narrow = run_task(model, tokenizer, PROMPT, arms, [cache_maker(model, arm) for arm in arms], n_reply=8)
    assert full.reply == wide.reply
    assert (full.score, full.evidence_kept, full.usage.rows_kept) == (wide.score, 1, full.prompt_tokens - 1)
    assert (narrow.usage.rows_kept, narrow.prompt_tokens) == (16, full.prompt_tokens)
    assert narrow.evidence_kept < 1


def test_bounded_caches_are_what_is_verified(tiny_model):
    model = tiny_model("gemma3_text")
    caches = filled(model, Arm("s", "streaming_llm", {"budget": 24}))
    assert [cache.tokens_kept for cache in caches if isinstance(cache, EvictingKVCache)] == [24]


def test_in_blocks_rows_leave_before_the_question_is_seen(tiny_model):
    model, tokenizer = tiny_model(num_hidden_layers=1), Letters()
    arm = Arm("t", "tova", {"budget": 60})
    tokens = make_prompt(tokenizer, PROMPT).tokens[:-1]
    by_hand = shared_prefill(model, tokens, block=20).into(cache_maker(model, arm)(), block=20)
    evidence = make_prompt(tokenizer, PROMPT).evidence
    [at_once], [in_blocks] = (
        run_task(model, tokenizer, PROMPT, [arm], [cache_maker(model, arm)], n_reply=1, block=block)
        for block in (0, 20)
    )
    assert in_blocks.evidence_kept == evidence_kept(by_hand, evidence) != at_once.evidence_kept
    assert in_blocks.usage.rows_kept == at_once.usage.rows_kept == 60

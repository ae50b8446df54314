"""One call from a prompt to a reply: a budget in rows or as a share, a context that is read before the question."""

import pytest
from mlx_lm import generate as plain_generate
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from tiny_folder import write_tiny_folder

from velox_cache import generate, install, uninstall
from velox_cache.generation import prompt_parts, read_context, rows_of

TEXT = "All the rows of this text are worth something to someone. " * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load(str(write_tiny_folder(tmp_path_factory.mktemp("tiny"))))


def test_a_budget_as_long_as_the_text_gives_the_plain_reply(tiny):
    model, tokenizer = tiny
    prompt = [*tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], add_generation_prompt=True)]
    assert str(generate(model, tokenizer, TEXT, method="l2norm", budget=999, max_tokens=8)) == plain_generate(
        model, tokenizer, prompt, max_tokens=8
    )


def test_a_share_is_of_the_prompt_context_included(tiny):
    model, tokenizer = tiny
    reply = generate(model, tokenizer, "What?", context=TEXT, method="streaming_llm", budget=0.25, max_tokens=4)
    assert reply.report.settings["budget"] == round(reply.prompt_tokens / 4)
    assert reply.usage.rows_kept == reply.report.settings["budget"]


def test_context_and_question_are_together_the_prompt_of_both(tiny):
    _, tokenizer = tiny
    together = prompt_parts(tokenizer, f"{TEXT}\n\nWhat?")[1]
    first, second = prompt_parts(tokenizer, "What?", TEXT)
    assert first + second == together
    assert tokenizer.decode(first).endswith("someone. ")
    first, second = prompt_parts(tokenizer, "What?", TEXT, chat=False)
    assert first + second == list(tokenizer.encode(f"{TEXT}\n\nWhat?"))


def test_the_context_is_evicted_from_before_anything_else_is_seen(tiny):
    model, tokenizer = tiny
    first, _ = prompt_parts(tokenizer, "What?", TEXT)
    install(model, "l2norm", budget=24)
    try:
        caches = make_prompt_cache(model)
        read_context(model, first, caches)
        assert {(cache.offset, cache.size()) for cache in caches} == {(len(first), 24)}
    finally:
        uninstall(model)


def test_the_model_ends_up_as_it_was_also_after_a_failure(tiny):
    model, tokenizer = tiny
    generate(model, tokenizer, "What?", method="l2norm", budget=16, max_tokens=1)
    assert "make_cache" not in vars(model)
    with pytest.raises(ZeroDivisionError):
        generate(model, tokenizer, "What?", method="l2norm", budget=16, sampler=lambda logprobs: 1 / 0)
    assert "make_cache" not in vars(model)


def test_caches_that_are_installed_are_used_and_no_others_beside_them(tiny):
    model, tokenizer = tiny
    install(model, "l2norm", budget=16)
    try:
        reply = generate(model, tokenizer, TEXT, max_tokens=2)
        assert reply.report is None
        assert reply.usage.rows_kept == 16
        with pytest.raises(ValueError, match=r"velox_cache\.uninstall"):
            generate(model, tokenizer, TEXT, budget=32)
    finally:
        uninstall(model)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -0.5])
def test_shares_that_are_none_are_refused(share):
    with pytest.raises(ValueError, match=r"such as 0\.25"):
        rows_of(share, 100)


def test_what_cannot_be_asked_is_refused(tiny):
    model, tokenizer = tiny
    for arguments, message in (
        ({"prompt": " "}, "empty"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1, 2]}, "must be text, got list"),
        ({"prompt": "x", "context": [1, 2]}, "must be text, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, tokenizer, method="l2norm", **arguments)

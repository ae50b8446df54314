"""Contexts with later questions: what is planted, what is asked, which half it is from."""

import random
import re

import pytest
from letters import Letters

from velox_cache.evaluation.contexts import make_context
from velox_cache.evaluation.questions import N_WRONG, TASKS, planted, question_about
from velox_cache.evaluation.text_kinds import HALVES, KINDS, kind_text

WORDS = [a + b + c for a in "bdfgk" for b in "aeiou" for c in ("lom", "rin", "sut", "nep")]
TEXT = "\n".join(" ".join(random.Random(i).choices(WORDS, k=11)) + f" {i}." for i in range(120))


def asked(task, seed):
    return question_about(task, random.Random(seed), TEXT)


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_is_planted_and_the_question_does_not_give_it_away(task):
    for seed in range(20):
        question = asked(task, seed)
        text = planted(random.Random(seed), TEXT, question.facts, question.quoted)
        words = [word.strip(",") for word in question.right.split()]
        assert all(word in " ".join(text.split()) for word in words)
        assert question.right not in question.asked
        assert question.right not in question.wrong
        assert len(question.wrong) >= N_WRONG
        assert all(fact in text for fact in question.facts)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_asks_the_same(task):
    assert asked(task, 3) == asked(task, 3)
    assert asked(task, 3) != asked(task, 4)


def test_the_later_statement_is_the_right_one():
    question = asked("changed", 5)
    text = planted(random.Random(1), TEXT, question.facts)
    cities = re.findall(r"lives in the city of (\w+)", text)
    assert question.right == f" {cities[-1]}"
    assert f" {cities[0]}" in question.wrong


def test_variables_lead_to_their_number():
    question = asked("variables", 7)
    held = {}
    facts = dict(re.findall(r"VAR (\w+) = (\w+)", "\n".join(question.facts)))
    for name in facts:
        value = facts[name]
        while value in facts:
            value = facts[value]
        held[name] = value
    name = re.search(r"variable (\w+) is", question.asked).group(1)
    assert f" {held[name]}" == question.right


def test_the_second_hop_needs_the_first():
    question = asked("two_hop", 7)
    facts = "\n".join(question.facts)
    person = re.search(r"where (\w+) was born", question.asked).group(1)
    city = re.search(rf"{person} was born in (\w+)\.", facts).group(1)
    assert re.findall(rf"The symbol of {city} is a (\w+)\.", facts) == [question.right.strip()]


def test_a_quoted_passage_stays_whole_and_goes_on_as_asked():
    for seed in range(20):
        question = asked("copying", seed)
        text = planted(random.Random(seed), TEXT, tuple(f"Fact {i}." for i in range(40)), question.quoted)
        assert question.quoted in text
        assert " ".join(question.quoted.split()).endswith(question.right)


def test_facts_keep_their_order_and_stand_on_lines_of_their_own():
    text = planted(random.Random(0), TEXT, ("Fact one.", "Fact two."))
    lines = text.split("\n")
    assert lines.index("Fact one.") < lines.index("Fact two.")


@pytest.mark.parametrize("kind", KINDS)
def test_the_halves_share_no_passage(kind):
    one, other = (kind_text(kind, half) for half in HALVES)
    lines = [{line for line in text.split("\n") if len(line) > 200} for text in (one, other)]
    windows = {one[at : at + 400] for at in range(0, len(one) - 400, 397)}
    assert not lines[0] & lines[1]
    assert sum(window in other for window in windows) <= 1  # modules quote each other's idioms, once in a while


def test_a_file_has_two_halves(tmp_path):
    (tmp_path / "own.txt").write_text("one two")
    assert [kind_text(str(tmp_path / "own.txt"), half) for half in HALVES] == ["one", " two"]


def a_context(half="choice", number=0, kind="prose", length=500):
    return make_context(Letters(), kind, half, number, length=length, n_continuation=20, tasks=("needle",))


def test_a_context_has_its_length_and_one_length_of_answers():
    context = a_context()
    assert (len(context.tokens), len(context.continuation)) == (500, 20)
    assert context.tokens[0] == 1  # what begins every text
    [question] = context.questions
    assert {len(answer) for answer in question.answers} == {len(question.answers[0])}
    assert len(question.answers) == 1 + N_WRONG


def test_no_fact_is_cut_off_to_fit():
    for number in range(12):
        context = a_context(number=number, length=260)
        assert "The secret code word of the" in Letters().decode(context.tokens)


def test_contexts_of_another_number_or_half_are_others():
    texts = {a_context(half, number).tokens for half in HALVES for number in range(3)}
    assert len(texts) == 6
    assert a_context() == a_context()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 20}, "no room"),
        ({"number": 10**4}, "no context"),
        ({"half": "both"}, "the halves are choice and report"),
        ({"kind": "poetry"}, "there is no text"),
    ],
)
def test_what_cannot_be_made_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        a_context(**change)

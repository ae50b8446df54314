"""Contexts in tokens: a long text of one kind with facts planted in it, how it goes on, and later questions."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.evaluation.questions import N_WRONG, TASKS, Question, planted, question_about
from velox_cache.evaluation.text_kinds import kind_text

_SPARE = 96  # tokens of the beginning, where nothing is planted: so many may be cut to fit
_TRIES = 12


@dataclass(frozen=True)
class AskedQuestion:
    """One question in tokens."""

    task: str
    tokens: tuple[int, ...]  # of the question and the beginning of its answer
    answers: tuple[tuple[int, ...], ...]  # all of one length: the right one, then N_WRONG wrong ones


@dataclass(frozen=True)
class Context:
    """One context."""

    kind: str
    half: str
    number: int
    tokens: tuple[int, ...]
    continuation: tuple[int, ...]  # the natural text's next tokens
    questions: tuple[AskedQuestion, ...]


def make_context(
    tokenizer: TokenizerWrapper,
    kind: str,
    half: str,
    number: int,
    *,
    length: int,
    n_continuation: int,
    tasks: Sequence[str] = tuple(TASKS),
) -> Context:
    """Context `number` of a kind in a half: `length` tokens, which no context of another number shares.

    Text and choices come from the arguments alone. Raises ValueError when the half has no such context, or the length
    leaves no room for the facts.
    """
    natural = _stretch(tokenizer, kind_text(kind, half), number, _SPARE + length + n_continuation)
    body, continuation = natural[: _SPARE + length], natural[_SPARE + length :]
    start = list(tokenizer.encode(""))  # what the tokenizer puts before every text
    for _ in range(_TRIES):
        if tasks and len(body) < 2 * _SPARE:
            break
        rng = random.Random(f"{half} {kind} {number} {length}")
        text = tokenizer.decode(body[_SPARE:])
        questions = [question_about(task, rng, text) for task in tasks]
        whole = next((question.quoted for question in questions if question.quoted), "")
        for question in questions:
            text = planted(rng, text, question.facts, whole)
        tokens = [*start, *_encoded(tokenizer, tokenizer.decode(body[:_SPARE]) + text)]
        over = len(tokens) - length
        if 0 <= over <= _SPARE - len(start):
            asked = tuple(found for question in questions if (found := _asked(tokenizer, question)) is not None)
            kept = (*start, *tokens[len(start) + over :])
            return Context(kind, half, number, kept, tuple(continuation), asked)
        body = natural[_SPARE + length - len(body) + over - _SPARE // 2 : _SPARE + length]
    raise ValueError(f"{length} tokens have no room for the facts of {', '.join(tasks)}; use a longer context")


def _stretch(tokenizer: TokenizerWrapper, text: str, number: int, length: int) -> list[int]:
    """Tokens number * length and on. Only as much text is read as that takes, at up to 8 characters each."""
    tokens = _encoded(tokenizer, text[: 8 * (number + 1) * length])[number * length : (number + 1) * length]
    if len(tokens) < length:
        raise ValueError(
            f"this text has no context {number + 1} of {length} tokens; ask for fewer contexts, or shorter ones"
        )
    return tokens


def _asked(tokenizer: TokenizerWrapper, question: Question) -> AskedQuestion | None:
    """None where too few wrong answers are as long as the right one."""
    right = _encoded(tokenizer, question.right)
    encoded = (_encoded(tokenizer, wrong) for wrong in question.wrong)
    wrong = [tokens for tokens in encoded if len(tokens) == len(right) and tokens != right][:N_WRONG]
    if len(wrong) < N_WRONG:
        return None
    return AskedQuestion(question.task, tuple(_encoded(tokenizer, question.asked)), tuple(map(tuple, [right, *wrong])))


def _encoded(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))

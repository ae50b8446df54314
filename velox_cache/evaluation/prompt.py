"""A prompt with one question about a long text, and the words that a right reply holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class TaskPrompt:
    """One question, in words."""

    text: str  # what is read, the question last
    reply_start: str  # how the reply begins; the model goes on from there
    answers: tuple[str, ...]  # words of a right reply; each counts the same
    evidence: tuple[str, ...]  # passages of `text` without which it cannot be known


@dataclass(frozen=True)
class PromptTokens:
    """A task's prompt in tokens."""

    tokens: tuple[int, ...]
    evidence: tuple[tuple[int, int], ...]  # token ranges [start, stop); a token of margin at either end


def score_reply(prompt: TaskPrompt, reply: str) -> float:
    """Share of the answers that the reply holds as whole words, in any case."""
    words = set(re.findall(r"\w+", reply.lower()))
    return sum(answer.lower() in words for answer in prompt.answers) / len(prompt.answers)


def make_prompt(tokenizer: TokenizerWrapper, prompt: TaskPrompt) -> PromptTokens:
    """Tokens of a prompt, inside the model's chat template where it has one, and where its evidence stands."""
    templated = tokenizer.has_chat_template
    text = f"{prompt.text}\n"
    if templated:
        messages = [{"role": "user", "content": prompt.text}]
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    text += prompt.reply_start

    def encode(part: str) -> list[int]:  # a rendered template spells out its special tokens
        return list(tokenizer.encode(part, add_special_tokens=not templated))

    tokens = encode(text)
    ranges = []
    for passage in prompt.evidence:
        at = text.index(passage)
        start, stop = len(encode(text[:at])), len(encode(text[: at + len(passage)]))
        ranges.append((max(0, start - 1), min(len(tokens), stop + 1)))
    return PromptTokens(tuple(tokens), tuple(ranges))


def inserted(filler: str, passages: Sequence[str], depths: Sequence[float]) -> str:
    """`filler` with each passage after the sentence or line at its depth (0: first, 1: last), one paragraph each."""
    pieces = re.split(r"(?<=[.:\n])\s+", filler.strip())
    places = [round(depth * len(pieces)) for depth in depths]
    out: list[str] = []
    for i in range(len(pieces) + 1):
        out.extend(f"\n{passage}\n" for passage, place in zip(passages, places, strict=True) if place == i)
        out.extend(pieces[i : i + 1])
    return " ".join(out)

"""Where the system message of a chat ends in its prompt."""

from collections.abc import Mapping, Sequence
from typing import Any


def system_end(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], prompt: Sequence[int], template_arguments: Mapping[str, Any]
) -> int:
    """Tokens of `prompt` up to the end of its system messages; 0 without any, or without a chat template.

    The template is rendered for the system messages with another turn after them: what both prompts begin with is what
    the template makes of the system messages, a list of tools included where it stands with them, and the beginning of
    a turn.
    """
    n_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if not n_system or not tokenizer.has_chat_template:
        return 0
    ends = []
    for content in ("", "0"):  # two, so that one that begins as the real turn does cannot mislead
        turn = {"role": "user", "content": content}
        alike = tokenizer.apply_chat_template(
            [*messages[:n_system], turn], add_generation_prompt=False, tokenize=True, **template_arguments
        )
        differs = (i for i, (one, other) in enumerate(zip(alike, prompt, strict=False)) if one != other)
        ends.append(next(differs, min(len(alike), len(prompt))))
    return min(ends)

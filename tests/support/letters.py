"""A tokenizer of one token per character, with or without a chat template, for models of 97 tokens."""

from typing import Any


class Letters:
    """Token 1 begins a text, 0 ends one."""

    eos_token_ids = frozenset({0})

    def __init__(self, has_chat_template: bool = False) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) % 96 + 1 for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token - 1 + (96 if token < 32 else 0)) for token in tokens if token > 1)

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return f"<user>{messages[0]['content']}</user><assistant>"

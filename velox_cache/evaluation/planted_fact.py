"""A fact hidden in a long prompt, and asked for at the end."""

from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class PlantedFact:
    """What is hidden, what is asked, and the word that a right answer contains."""

    fact: str
    question: str
    answer: str

    def is_answered_by(self, text: str) -> bool:
        """Whether `text` holds the answer, in any case."""
        return self.answer.lower() in text.lower()


def planted_fact_prompt(
    tokenizer: TokenizerWrapper, planted: PlantedFact, filler: str, *, n_filler: int, depth: float = 0.1
) -> list[int]:
    """Tokens of a prompt: `n_filler` tokens of `filler`, the fact after the share `depth` of them, then the question.

    Inside the model's chat template where it has one. Raises ValueError when the filler is too short, or depth is not
    in [0, 1].
    """
    tokens = list(tokenizer.encode(filler))
    if not 1 <= n_filler <= len(tokens):
        raise ValueError(f"the filler holds {len(tokens)} tokens, n_filler={n_filler} are asked for; give more text")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be between 0 (start) and 1 (end), got {depth}")
    at = round(depth * n_filler)
    before, after = tokenizer.decode(tokens[:at]), tokenizer.decode(tokens[at:n_filler])
    text = f"{before}\n\n{planted.fact}\n\n{after}\n\n{planted.question}"
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))

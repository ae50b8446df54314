"""Texts that a model reads twice, asked in between to repeat them, and the sums of what their rows were worth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from velox_cache.calibration.row_worth import row_worth
from velox_cache.calibration.score_sums import HELD_OUT_EVERY, no_score_sums, with_text
from velox_cache.calibration.sums import LayerSums, no_layer_sums
from velox_cache.introspection.observed_prefill import observed_prefill

REQUEST = "\n\nRepeat the text above, word for word.\n\n"
TEXT_LENGTH = 400  # tokens; attention weights of a few times its square are held
MOST_TEXTS = 16


@dataclass(frozen=True)
class ReadAgain:
    """A text and whether the fit is judged by it."""

    tokens: tuple[int, ...]
    held_out: bool


def texts_to_read_again(sequences: Sequence[Sequence[int]]) -> list[ReadAgain]:
    """Pieces of the sequences, of one length, at most `MOST_TEXTS` of them, spread over all."""
    total = sum(map(len, sequences))
    length = min(TEXT_LENGTH, total // HELD_OUT_EVERY, max(map(len, sequences)))
    pieces = [s[at : at + length] for s in sequences for at in range(0, len(s) - length + 1, length)]
    n_texts = min(MOST_TEXTS, len(pieces))
    spread = [pieces[i * len(pieces) // n_texts] for i in range(n_texts)]
    return [ReadAgain(tuple(piece), i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) for i, piece in enumerate(spread)]


def request_tokens(encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The request, without what the tokenizer puts before every text."""
    before, tokens = list(encode("")), list(encode(REQUEST))
    return tokens[1:] if before and tokens[:1] == before[:1] else tokens


def sums_of_texts(
    sums: Mapping[int, LayerSums],
    model: nn.Module,
    texts: Sequence[ReadAgain],
    request: Sequence[int],
    advance: Callable[[int], object],
) -> dict[int, LayerSums]:
    """`sums`, by layer, with what the rows of the texts were worth. `advance` is called with 1 after each text."""
    found = dict(sums)
    for text in texts:
        tokens = [*text.tokens, *request, *text.tokens]
        for block in observed_prefill(model, tokens, len(tokens)):
            for call in block:
                layer = found.get(call.layer, no_layer_sums(call))
                n_kv_heads, head_dim, value_dim = call.keys.shape[1], call.keys.shape[3], call.values.shape[3]
                so_far = layer.scores or no_score_sums(n_kv_heads, head_dim, value_dim)
                worth = row_worth(call, len(text.tokens))
                found[call.layer] = replace(layer, scores=with_text(so_far, worth, held_out=text.held_out))
                mx.eval(found[call.layer].arrays())
        advance(1)
    return found

"""KVzip's score: the most attention that a row gets while the model repeats its context.

The context is repeated chunk by chunk. A chunk's rows score by the softmax of the repeating queries over the sinks, the
chunk's rows and the input itself; the largest weight over queries and the heads of a group counts. What is fed to the
model is a request, the end of its chat template, and the chunk itself: it is not asked to write it.

Source: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (arXiv:2505.23416), section 3. The
requests and the tokens that lead to a chunk are those of the authors' code.

Differs from the paper:

- The sinks in the softmax are the first rows of the context. In the authors' code they are the system prompt.
- Scores are float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from velox_cache.introspection.attention_over import attention_over
from velox_cache.introspection.observed_prefill import forked_caches, observed_prefill

CHUNK = 2000  # tokens repeated at a time, as in the paper
_LEADING = 8  # tokens before a chunk that say where it begins
_QUERIES = 256  # whose logits are there at a time
_FIRST = "\n\nRepeat the previous context exactly."
_NEXT = "\n\nRepeat the part of the previous context exactly, starting with "
_MARK = "<velox: here the reply begins>"


class Tokenizer(Protocol):
    """What is asked of a tokenizer: mlx_lm's has it."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any: ...


def repeat_scores(
    model: nn.Module,
    tokenizer: Tokenizer,
    caches: Sequence[Any],
    context: Sequence[int],
    *,
    n_sink: int = 4,
    chunk: int = CHUNK,
) -> Mapping[int, mx.array]:
    """How much each row of a context is needed to repeat it. The caches stay as they are.

    Args:
        model: whose caches these are.
        tokenizer: the model's.
        caches: the model's own, which have read `context` and nothing else.
        context: token ids.
        n_sink: leading rows that are in every softmax.
        chunk: tokens repeated at a time.

    Returns:
        By layer, for each layer with a plain cache: float32 [H,N].

    Raises:
        ValueError: the model's queries cannot be observed, or its softmax has more in it than logits.
    """
    found: dict[int, list[mx.array]] = {}
    ending = _reply_begins(tokenizer)
    for start in range(0, len(context), chunk):
        stop = min(start + chunk, len(context))
        request = tokenizer.encode(_NEXT if start else _FIRST, add_special_tokens=False)
        tokens = [*request, *context[max(start - _LEADING, 0) : start], *ending, *context[start:stop]]
        sinks = mx.arange(min(n_sink, start))
        rows = mx.concatenate([sinks, mx.arange(start, stop)])
        (calls,) = observed_prefill(model, tokens, len(tokens), caches=forked_caches(caches))
        of_chunk: dict[int, mx.array] = {}
        for call in calls:
            for first in range(0, len(tokens), _QUERIES):
                weights = attention_over(call, rows, slice(first, first + _QUERIES))
                most = weights.max(axis=(1, 2))[:, sinks.shape[0] :]
                of_chunk[call.layer] = mx.maximum(of_chunk.get(call.layer, most), most)
                mx.eval(of_chunk[call.layer])
        for layer, most in of_chunk.items():
            found.setdefault(layer, []).append(most)
    return {layer: mx.concatenate(parts, axis=1) for layer, parts in found.items()}


def _reply_begins(tokenizer: Tokenizer) -> list[int]:
    """The tokens between a question and its answer."""
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode("\n", add_special_tokens=False))
    asked = [{"role": "user", "content": _MARK}]
    wrapped = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(wrapped.rpartition(_MARK)[2], add_special_tokens=False))

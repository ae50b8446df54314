"""tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF file.

The format is that of the `tokenizers` library. llama.cpp keeps two kinds of vocabulary here: byte-level BPE with its
merges ("gpt2"), and SentencePiece BPE with one score per token ("llama").
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

Metadata = Mapping[str, Any]

_SPACE = "\u2581"


class TokenType(IntEnum):
    """llama.cpp's token types that matter here."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """The content of tokenizer.json. Raises ValueError for a vocabulary of another kind."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if (kind, pre) == ("gpt2", "smollm"):
        pipeline = _byte_level_pipeline(metadata)
    elif kind == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True):
        pipeline = _sentencepiece_pipeline(metadata)
    else:
        raise ValueError(f"a GGUF vocabulary of kind {kind!r} with pre-tokenizer {pre!r} is not supported")
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added_tokens(metadata), **pipeline}


def tokenizer_config(metadata: Metadata, context_length: int) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens and, where the file has one, the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{role}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def eos_token_ids(metadata: Metadata) -> list[int]:
    """The tokens that end a generation: the file's own, and the end of a turn where the vocabulary has one."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    turn_ends = [token_id for token_id, token in enumerate(tokens) if token in ("<|im_end|>", "<end_of_turn>")]
    return sorted({metadata["tokenizer.ggml.eos_token_id"], *turn_ends})


def _added_tokens(metadata: Metadata) -> list[dict[str, Any]]:
    matching = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    typed = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return [
        {"id": token_id, "content": token, **matching, "special": kind == TokenType.CONTROL}
        for token_id, (token, kind) in enumerate(typed)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _bpe(metadata: Metadata, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    vocabulary = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    return {"type": "BPE", "dropout": None, "vocab": vocabulary, "merges": merges, **options}


def _byte_level_pipeline(metadata: Metadata) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": _bpe(metadata, merges, unk_token=None, fuse_unk=False, byte_fallback=False),
    }


def _sentencepiece_pipeline(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": _bos_template(metadata) if metadata.get("tokenizer.ggml.add_bos_token") else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": _bpe(metadata, _merges_by_score(metadata), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_by_score(metadata: Metadata) -> list[list[str]]:
    """Every way to build a token from two others, best score first: SentencePiece joins the best-scoring pair first."""
    normal = {
        token: score
        for token, kind, score in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.token_type"],
            metadata["tokenizer.ggml.scores"],
            strict=True,
        )
        if kind == TokenType.NORMAL
    }
    return [
        [token[:cut], token[cut:]]
        for token in sorted(normal, key=lambda token: -normal[token])
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def _bos_template(metadata: Metadata) -> dict[str, Any]:
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = metadata["tokenizer.ggml.tokens"][bos_id]
    first, second = ({"Sequence": {"id": side, "type_id": 0}} for side in ("A", "B"))
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, start, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }

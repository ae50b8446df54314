"""Cache accounting, greedy answers and planted facts."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from next_is_plus_one import NextIsPlusOne

from velox_cache import install, uninstall
from velox_cache.evaluation import PlantedFact, cache_usage, greedy_answer, planted_fact_prompt

ROW_BYTES = 2 * 2 * 8 * 4  # key and value, 2 heads of dimension 8, float32: one layer of the tiny model


class Words:
    """A tokenizer of whole words, without a chat template."""

    has_chat_template = False
    eos_token_ids = frozenset({0})

    def __init__(self) -> None:
        self.words = ["<end>"]

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] if token < len(self.words) else f"w{token}" for token in tokens)


def filled(model, n_tokens):
    caches = make_prompt_cache(model)
    mx.eval(model(mx.arange(n_tokens)[None] % 97, cache=caches))
    return caches


def test_a_full_cache_counts_its_rows_and_not_its_room(tiny_model):
    usage = cache_usage(filled(tiny_model(), 40))  # a KVCache makes room for 256 rows at once
    assert (usage.tokens_seen, usage.rows_kept) == (40, 40)
    assert usage.kept_bytes == usage.full_bytes == 2 * 40 * ROW_BYTES
    assert usage.compression == 1


def test_an_evicting_cache_counts_the_rows_it_kept(tiny_model):
    model = tiny_model()
    install(model, "streaming_llm", budget=16)
    usage = cache_usage(filled(model, 40))
    uninstall(model)
    assert (usage.tokens_seen, usage.rows_kept) == (40, 16)
    assert (usage.kept_bytes, usage.full_bytes) == (2 * 16 * ROW_BYTES, 2 * 40 * ROW_BYTES)
    assert usage.compression == 2.5


def test_sliding_layers_count_the_same_on_both_sides(tiny_model):
    model = tiny_model("gemma3_text")
    install(model, "streaming_llm", budget=16)
    caches = filled(model, 40)
    uninstall(model)
    sliding = sum(cache.nbytes for cache in caches if type(cache).__name__ == "RotatingKVCache")
    usage = cache_usage(caches)
    assert sliding > 0
    assert usage.full_bytes - usage.kept_bytes == (40 - 16) * ROW_BYTES


def test_an_empty_cache_has_no_bytes(tiny_model):
    usage = cache_usage(make_prompt_cache(tiny_model()))
    assert (usage.kept_bytes, usage.compression) == (0, 1)


def test_the_answer_is_the_greedy_one(tiny_model):
    model, tokenizer = tiny_model(), Words()
    prompt = [5, 9, 2, 6, 5, 3]
    expected = list(prompt)
    for _ in range(8):
        expected.append(model(mx.array([expected]))[0, -1].argmax().item())
    answer = greedy_answer(model, tokenizer, prompt, n_tokens=8)
    until_end = expected[6 : expected.index(0, 6)] if 0 in expected[6:] else expected[6:]
    assert answer.text == tokenizer.decode(until_end).strip()


def test_the_answer_ends_where_the_model_ends_it():
    tokenizer = Words()
    tokenizer.eos_token_ids = frozenset({7})
    assert greedy_answer(NextIsPlusOne(10, 0.9), tokenizer, [1, 2, 3], n_tokens=8).text == "w4 w5 w6"


def test_decoding_goes_on_past_the_answer(tiny_model):
    model, tokenizer = tiny_model(), Words()
    tokenizer.eos_token_ids = frozenset(range(97))
    answer = greedy_answer(model, tokenizer, [5, 9, 2], n_tokens=8)
    assert answer.text == ""
    assert answer.usage.tokens_seen >= 3 + 8 - 1


def test_progress_of_an_answer_counts_prompt_and_tokens(tiny_model):
    counts: list[int] = []
    greedy_answer(tiny_model(), Words(), [5, 9, 2, 6], n_tokens=8, advance=counts.append)
    assert sum(counts) == 4 + 8


PLANTED = PlantedFact("The word is marigold.", "What is the word?", "marigold")


def test_the_fact_stands_at_its_depth():
    tokenizer = Words()
    filler = " ".join(f"filler{i}" for i in range(200))
    words = tokenizer.decode(planted_fact_prompt(tokenizer, PLANTED, filler, n_filler=100, depth=0.3)).split()
    assert words[:30] == [f"filler{i}" for i in range(30)]
    assert words[30:34] == PLANTED.fact.split()
    assert words[34:104] == [f"filler{i}" for i in range(30, 100)]
    assert words[104:] == PLANTED.question.split()


@pytest.mark.parametrize(("n_filler", "depth"), [(0, 0.1), (201, 0.1), (100, -0.1), (100, 1.1)])
def test_an_impossible_prompt_is_refused(n_filler, depth):
    filler = " ".join(f"filler{i}" for i in range(200))
    with pytest.raises(ValueError, match=r"filler|depth"):
        planted_fact_prompt(Words(), PLANTED, filler, n_filler=n_filler, depth=depth)


def test_an_answer_counts_in_any_case_and_context():
    assert PLANTED.is_answered_by("It is MARIGOLD!")
    assert not PLANTED.is_answered_by("It is mari gold")

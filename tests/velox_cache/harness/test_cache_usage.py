"""Cache accounting: rows and bytes that a prompt cache holds, beside those of a full one."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from velox_cache import install, uninstall
from velox_cache.evaluation import cache_usage

ROW_BYTES = 2 * 2 * 8 * 4  # key and value, 2 heads of dimension 8, float32: one layer of the tiny model


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

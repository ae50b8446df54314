"""`summary` says of each cache what it holds and what the full cache would; a cache's repr says the same in a line."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
import velox_fn
from velox_cache.harness.memory import cache_usage

H, D, TOKENS, BUDGET = 2, 8, 40, 16
ROW = H * 2 * D * 4  # bytes of keys and values of one token in float32


def filled(model: nn.Module) -> list[vc.EvictingKVCache]:
    caches = make_prompt_cache(model)
    model(mx.arange(TOKENS)[None] % 97, cache=caches)
    return caches


def test_each_layer_says_what_it_holds(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gemma3_text", num_hidden_layers=4)  # a sliding window in every other layer
    vc.install(model, "l2norm", budget=BUDGET)
    found = vc.summary(filled(model))
    assert [entry.method for entry in found.layers] == ["RotatingKVCache", "l2norm"] * 2
    assert [entry.rows for entry in found.layers] == [None, BUDGET] * 2
    assert [entry.tokens for entry in found.layers] == [None, TOKENS] * 2
    bounded = found.layers[1]
    assert (bounded.kept_bytes, bounded.full_bytes) == (BUDGET * ROW, TOKENS * ROW)
    assert bounded.held_bytes > bounded.kept_bytes  # ranks
    assert bounded.ratio == TOKENS / BUDGET
    assert found.kept_bytes == sum(entry.kept_bytes for entry in found.layers)
    assert found.ratio == found.full_bytes / found.kept_bytes < bounded.ratio


def test_plain_caches_keep_everything(tiny_model: Callable[..., nn.Module]) -> None:
    found = vc.summary(filled(tiny_model()))
    assert {(entry.method, entry.rows, entry.tokens) for entry in found.layers} == {("KVCache", TOKENS, TOKENS)}
    assert {(entry.kept_bytes, entry.full_bytes) for entry in found.layers} == {(TOKENS * ROW, TOKENS * ROW)}
    assert found.ratio == 1.0
    assert found.held_bytes > found.kept_bytes  # room for 256 rows


def test_empty_caches_have_a_summary(tiny_model: Callable[..., nn.Module]) -> None:
    for bounded in (False, True):
        model = tiny_model()
        if bounded:
            vc.install(model, "l2norm", budget=BUDGET)
        found = vc.summary(make_prompt_cache(model))
        assert (found.kept_bytes, found.full_bytes, found.ratio) == (0, 0, 1.0)
        assert "1.0" in str(found)
    assert vc.summary([]).ratio == 1.0


def test_the_table_puts_layers_that_are_alike_in_one_line(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(num_hidden_layers=5)
    vc.install(model, "l2norm", budget=[BUDGET, 30, 30, BUDGET, BUDGET])
    header, *lines, total = str(vc.summary(filled(model))).splitlines()
    assert header.split()[:4] == ["layers", "method", "rows", "tokens"]
    assert [line.split()[:4] for line in lines] == [
        ["0", "l2norm", "16", "40"],
        ["1-2", "l2norm", "30", "40"],
        ["3-4", "l2norm", "16", "40"],
    ]
    assert total.split()[0] == "all"
    assert total.split()[-1] == f"{5 * 40 / (3 * 16 + 2 * 30):.1f}"


def test_usage_is_the_sum_of_the_summary(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gemma3_text", num_hidden_layers=4)
    vc.install(model, "l2norm", budget=BUDGET)
    caches = filled(model)
    usage, found = cache_usage(caches), vc.summary(caches)
    assert (usage.tokens_seen, usage.rows_kept) == (TOKENS, BUDGET)
    assert (usage.kept_bytes, usage.full_bytes) == (found.kept_bytes, found.full_bytes)


def test_a_loaded_cache_has_the_same_summary(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=BUDGET)
    caches = filled(model)
    vc.save_prompt_cache(tmp_path / "kept.safetensors", caches)
    again = vc.summary(vc.load_prompt_cache(tmp_path / "kept.safetensors"))
    assert [entry.kept_bytes for entry in again.layers] == [entry.kept_bytes for entry in vc.summary(caches).layers]


def test_a_cache_shows_method_rows_tokens_and_bytes() -> None:
    cache = vc.EvictingKVCache(velox_fn.streaming_llm(budget=BUDGET))
    assert repr(cache) == "<EvictingKVCache: streaming_llm, budget 16, 0 rows of 0 tokens, 0 bytes>"
    caches = []
    for n_tokens in (40, 7):
        one = vc.EvictingKVCache(cache.method)
        one.update_and_fetch(mx.zeros((1, H, n_tokens, D)), mx.zeros((1, H, n_tokens, D)))
        caches.append(one)
    assert (
        repr(caches[0])
        == f"<EvictingKVCache: streaming_llm, budget 16, 16 rows of 40 tokens, {caches[0].nbytes:,} bytes>"
    )
    assert "16 rows of 40 + 7 tokens" in repr(vc.EvictingKVCache.merge(caches))
    named = vc.CurDKVKVCache(vc.KVCacheConfig(method="curdkv", curdkv_budget=20))
    assert repr(named).startswith("<CurDKVKVCache: curdkv, budget 20, ")

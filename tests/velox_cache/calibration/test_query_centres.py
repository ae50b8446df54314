"""Centres of the queries before RoPE, against those that the model itself makes."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from velox_cache import calibrate, install, load_calibration, save_calibration
from velox_cache.calibration.sums import pair_sums
from velox_fn import RopeSpec, rope_remap_positions

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 3


@pytest.mark.parametrize("traditional", [False, True])
def test_pair_sums_are_those_of_queries_before_they_turned(traditional):
    rope = RopeSpec(dims=6, base=40.0, traditional=traditional, first=2)
    queries = np.random.default_rng(0).standard_normal((3, 20, 8)).astype(np.float32)
    turned = rope_remap_positions(mx.array(queries[None]), mx.array(0), 5 + mx.arange(20), rope)[0]
    inside = queries[..., 2:]
    pairs = inside[..., 0::2] + 1j * inside[..., 1::2] if traditional else inside[..., :3] + 1j * inside[..., 3:]
    expected = np.stack([pairs.real, pairs.imag, np.abs(pairs)], axis=1).sum(2)
    np.testing.assert_allclose(np.array(pair_sums(turned, 5, rope)), expected, rtol=1e-4, atol=1e-4)


def test_centres_are_those_of_the_queries_that_the_model_projects(tiny_model, tokenizer):
    model = tiny_model()
    [layer, *_] = calibrate(model, tokenizer, [TEXT], progress=False, prefill_step_size=30).statistics
    first, tokens = model.model.layers[0], mx.array(tokenizer.encode(TEXT))
    hidden = first.input_layernorm(model.model.embed_tokens(tokens))
    attention = first.self_attn
    n_heads, n_kv_heads = attention.n_heads, attention.n_kv_heads
    queries = np.array(attention.q_proj(hidden), np.float64).reshape(len(tokens), n_heads, -1) * attention.scale
    half = queries.shape[-1] // 2
    pairs = queries[..., :half] + 1j * queries[..., half:]
    expected = np.stack([pairs.real.mean(0), pairs.imag.mean(0), np.abs(pairs).mean(0)], axis=1)
    found = np.array(layer.query_centres)
    assert found.shape == (n_kv_heads, n_heads // n_kv_heads, 3, half)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)


def test_a_file_without_centres_loads_and_only_its_method_asks_for_them(tiny_model, tokenizer, tmp_path):
    made = calibrate(tiny_model(), tokenizer, [TEXT], progress=False)
    older = [dataclasses.replace(layer, query_centres=None) for layer in made.statistics]
    save_calibration(dataclasses.replace(made, statistics=older), tmp_path / "older.npz")
    save_calibration(made, tmp_path / "newer.npz")
    older, newer = (load_calibration(tmp_path / f"{age}.npz") for age in ("older", "newer"))
    assert [layer.query_centres for layer in older.statistics] == [None] * len(older.statistics)
    for layer, again in zip(made.statistics, newer.statistics, strict=True):
        assert mx.array_equal(layer.query_centres, again.query_centres).item()
    install(tiny_model(), "keydiff", budget=16, calibration=older)
    with pytest.raises(ValueError, match=r"no query_centres: .*rotary embedding cannot be read"):
        install(tiny_model(), "triattention", budget=16, calibration=older)

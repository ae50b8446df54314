"""Rows that leave in chunks, behind the adapter: installed, saved, refused."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import velox_cache
from velox_fn import kept_positions

INTERVAL, CHUNK = 16, 4


def filled(model, tokens, **settings):
    velox_cache.install(model, "l2norm", budget=24, recent=4, **settings)
    caches = make_prompt_cache(model)
    for start in range(0, len(tokens), 30):
        model(mx.array([tokens[start : start + 30]]), cache=caches)
    return caches


def test_an_installed_model_keeps_whole_chunks_and_its_file_goes_on(tiny_model, tmp_path):
    tokens = np.random.default_rng(1).integers(0, 60, 65).tolist()
    model = tiny_model()
    caches = filled(model, tokens, interval=INTERVAL, chunk=CHUNK)
    for cache in caches:  # sinks, recent rows and interval are whole chunks here, and so all that stays is
        for head in np.array(kept_positions(cache.record))[0].tolist():
            kept = [at for at in head if at < 64]
            assert len(kept) == 24
            assert {at // CHUNK * CHUNK + i for at in kept for i in range(CHUNK)} == set(kept)
    velox_cache.save_prompt_cache(tmp_path / "saved", caches)
    loaded = velox_cache.load_prompt_cache(tmp_path / "saved")
    for cache in (caches, loaded):
        model(mx.array([tokens[:40]]), cache=cache)
    for one, other in zip(caches, loaded, strict=True):
        assert other.method.settings["chunk"] == CHUNK
        np.testing.assert_array_equal(np.array(kept_positions(one.record)), np.array(kept_positions(other.record)))


def test_chunks_without_an_interval_are_refused(tiny_model):
    with pytest.raises(ValueError, match="interval=32"):
        velox_cache.install(tiny_model(), "l2norm", budget=24, chunk=CHUNK)

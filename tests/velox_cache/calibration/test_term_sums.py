"""Means and deviations of the static scores, against numpy over all rows at once."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from velox_cache import calibrate
from velox_cache.calibration.term_sums import no_term_sums, term_moments, with_rows
from velox_fn import SCORERS

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 3
H, D, D_V, N = 2, 8, 6, 50


def rows(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((H, N, D), (H, N, D_V), (H, D), (H, D))
    return tuple((1 + rng.standard_normal(shape)).astype(np.float32) for shape in shapes)


def oracle(keys, values, filters, mean_keys, positions):
    """Means and deviations [H,T] in float64, from the scores of all rows [H,N,..]."""
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    squares, value_squares = (keys**2).sum(-1), (values**2).sum(-1)
    unit = keys / np.sqrt(squares)[..., None]
    scores = [
        np.einsum("hnd,hd->hn", keys, filters.astype(np.float64)),
        -np.einsum("hnd,hd->hn", unit, mean_keys.astype(np.float64)),
        -squares,
        value_squares,
        squares * value_squares,
        np.broadcast_to(positions.astype(np.float64), squares.shape),
    ]
    return np.stack([s.mean(-1) for s in scores], -1), np.stack([s.std(-1) for s in scores], -1)


def moments(keys, values, filters, mean_keys, cuts):
    sums = no_term_sums(H, D)
    for start, stop in zip([0, *cuts], [*cuts, N], strict=True):
        block = (mx.array(part[None, :, start:stop]) for part in (keys, values))
        sums = with_rows(sums, *block, start)
    with mx.stream(mx.cpu):
        found = term_moments(sums, mx.array(float(N), mx.float64), mx.array(filters), mx.array(mean_keys))
    return [np.array(part) for part in found]


@pytest.mark.parametrize("cuts", [[], [1], [7, 30, 31]], ids=str)
def test_moments_are_those_of_the_scores_of_all_rows_however_they_come(cuts):
    keys, values, filters, mean_keys = rows()
    for found, wanted in zip(
        moments(keys, values, filters, mean_keys, cuts),
        oracle(keys, values, filters, mean_keys, np.arange(N)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_a_score_that_does_not_vary_has_deviation_zero():
    keys, values, filters, mean_keys = rows()
    keys[:], values[:] = keys[:, :1], values[:, :1]
    _, deviations = moments(keys, values, filters, mean_keys, [20])
    assert (deviations[:, :-1] == 0).all()
    assert (deviations[:, -1] > 0).all()  # positions vary


def test_a_small_spread_far_from_zero_is_not_lost():
    keys, values, filters, mean_keys = rows()
    keys = keys * np.float32(1e-3) + np.float32(100)
    _, found = moments(keys, values, filters, mean_keys, [20])
    _, wanted = oracle(keys, values, filters, mean_keys, np.arange(N))
    np.testing.assert_allclose(found[:, 0], wanted[:, 0], rtol=1e-4)


@pytest.mark.parametrize("step", [7, 512])
def test_calibration_takes_the_moments_of_a_models_own_rows(tiny_model, tokenizer, step):
    model, tokens = tiny_model(), tokenizer.encode(TEXT)
    found = calibrate(model, tokenizer, [TEXT], sequence_length=100, prefill_step_size=step, progress=False)
    keys, values, positions = [], [], []
    for start in range(0, len(tokens), 100):
        cache, sequence = make_prompt_cache(model), tokens[start : start + 100]
        model(mx.array([sequence]), cache=cache)
        held = [np.array(part)[0, :, : len(sequence)] for part in cache[1].state[:2]]
        keys.append(held[0])
        values.append(held[1])
        positions.append(np.arange(len(sequence)))
    statistics = found.statistics[1]
    wanted = oracle(
        np.concatenate(keys, 1),
        np.concatenate(values, 1),
        np.array(found.filters[1]),
        np.array(statistics.mean_keys),
        np.concatenate(positions),
    )
    assert found.terms == tuple(SCORERS)
    np.testing.assert_allclose(np.array(statistics.term_means), wanted[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(statistics.term_deviations), wanted[1], rtol=1e-4)

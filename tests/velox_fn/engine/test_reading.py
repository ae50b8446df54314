"""Queries that read arrays made of the rows score them as queries over the rows themselves do."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_fn import curdkv, expected_attention, h2o, kept_positions, snapkv, tova
from velox_fn.engine import select
from velox_fn.engine.attention import Reading
from velox_fn.engine.eviction import Eviction

N_KV_HEADS, N_HEADS, LATENT, ROTARY = 2, 6, 8, 4
SCALE = 0.3
CALLS = (9, 1, 1, 1, 6, 1, 5)
METHODS: dict[str, Callable[..., Eviction]] = {
    "h2o": lambda: h2o(budget=10, n_sink=1, grace=2),
    "tova": lambda: tova(budget=10, n_sink=1),
    "snapkv": lambda: snapkv(budget=10, n_sink=1, obs_window=4, kernel=3),
    "curdkv": lambda: curdkv(budget=10, n_sink=1, window=3),
}


def over_rows(view: tuple[mx.array, mx.array], queries: mx.array) -> mx.array:
    return queries


def over_latents(view: tuple[mx.array, mx.array], queries: mx.array) -> Reading:
    """The leading dimensions as keys, one for each query head, the others as numbers that are added to the logits."""
    rotary = view[0][..., LATENT:].swapaxes(-1, -2)
    added = SCALE * (queries[..., LATENT:] @ mx.repeat(rotary, N_HEADS // N_KV_HEADS, axis=1))
    keys = mx.repeat(view[0][..., :LATENT], N_HEADS // N_KV_HEADS, axis=1)
    return Reading(queries[..., :LATENT], keys, added)


def blocks(batch: int) -> list[tuple[mx.array, mx.array, mx.array]]:
    key = iter(mx.random.split(mx.random.key(3), 3 * len(CALLS)))
    heads = (N_KV_HEADS, N_KV_HEADS, N_HEADS)
    shapes = [[(batch, h, n, LATENT + ROTARY) for h in heads] for n in CALLS]
    return [tuple(2 * mx.random.normal(shape, key=next(key)) for shape in three) for three in shapes]


def states(method: Eviction, read: Callable[..., Any], valid: list[mx.array | None]) -> list[tuple[np.ndarray, ...]]:
    """Kept positions, and the scores of the rows as they lie, after each call."""
    assert method.observation is not None
    state, found = method.init(2, N_KV_HEADS, LATENT + ROTARY), []
    for (keys, values, queries), real in zip(blocks(2), valid, strict=True):
        state, view = method.observation.land(state, keys, values, real)
        state = method.observation.observe(state, read(view, queries), SCALE, real, None)
        store = state.store
        found.append((np.array(kept_positions(state)), np.array(select.rank_scores(store.ranks[:, :, : store.filled]))))
    return found


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_rows_are_scored_and_kept_as_by_queries_over_them(name: str, ragged: bool) -> None:
    valid = [mx.array([n, max(1, n - 2)], mx.int32) if ragged and n > 1 else None for n in CALLS]
    own, read = (states(METHODS[name](), form, valid) for form in (over_rows, over_latents))
    for (positions, scores), (others, other_scores) in zip(own, read, strict=True):
        np.testing.assert_array_equal(positions, others)
        np.testing.assert_allclose(scores, other_scores, rtol=1e-4, atol=1e-5)
    assert own[-1][0].max() > own[-1][0].shape[-1]  # rows have left


def test_arrays_of_other_rows_are_refused() -> None:
    method = METHODS["h2o"]()
    assert method.observation is not None
    keys, values, queries = blocks(2)[0]
    state, view = method.observation.land(method.init(2, N_KV_HEADS, LATENT + ROTARY), keys, values, None)
    with pytest.raises(ValueError, match="of 9 rows in 2 heads"):
        method.observation.observe(state, Reading(queries, view[0][:, :, 1:]), SCALE, None, None)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (h2o(budget=32, interval=16), "at intervals"),
        (curdkv(budget=32, granularity="token"), "one after the other"),
        (expected_attention(budget=32), "distribution of the queries"),
    ],
)
def test_what_needs_the_rows_themselves_says_so(method: Eviction, words: str) -> None:
    assert method.observation is not None
    keys, values, queries = blocks(2)[0]
    state, view = method.observation.land(method.init(2, N_KV_HEADS, LATENT + ROTARY), keys, values, None)
    with pytest.raises(ValueError, match=words):
        method.observation.observe(state, over_latents(view, queries), SCALE, None, None)

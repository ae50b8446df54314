"""Positions that stop at the budget: the ablation moves nothing but the offset."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache.evaluation.stalled_offset import StalledCache, stalled_offset
from velox_cache.harness.arms import Arm, cache_maker

TOKENS = [int(token) for token in np.random.default_rng(6).integers(97, size=70)]


def read(model, budget, tokens=TOKENS):
    make = cache_maker(model, Arm("l2norm", "l2norm", {"budget": budget, "recent": 0}))
    return {one.positions: one for one in stalled_offset(model, tokens, make, n_context=40)}


def test_stalled_positions_change_what_the_model_says(tiny_model):
    found = read(tiny_model(), 24)
    assert list(found) == ["full cache", "tokens seen", "rows held"]
    assert found["full cache"].fidelity.kl_divergence == 0
    assert found["rows held"].perplexity != pytest.approx(found["tokens seen"].perplexity, rel=1e-4)


def test_within_the_budget_rows_are_tokens_and_nothing_changes(tiny_model):
    with pytest.warns(UserWarning, match="no budget is reached: 69 tokens"):
        found = read(tiny_model(), 80)
    assert found["rows held"].perplexity == found["tokens seen"].perplexity


def test_a_stalled_cache_counts_rows_and_is_else_the_cache(tiny_model):
    model = tiny_model()
    cache = cache_maker(model, Arm("l2norm", "l2norm", {"budget": 24}))()[0]
    cache.update_and_fetch(mx.ones((1, 2, 60, 8)), mx.ones((1, 2, 60, 8)))
    stalled = StalledCache(cache)
    assert (cache.offset, stalled.offset, stalled.size()) == (60, 24, 24)

"""`fused_evict`: the selection rule over rows that a caller brings."""

from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from oracles import best_positions

from metal_src import kernel_failure
from velox_fn import fused_evict

N = 12
RNG = np.random.default_rng(0)
KEYS = mx.array(RNG.standard_normal((1, 2, N, 4)).astype(np.float32))
VALUES = mx.array(RNG.standard_normal((1, 2, N, 3)).astype(np.float32))
SCORES = RNG.integers(-2, 3, (1, 2, N)).astype(np.float32)  # with ties
POSITIONS = mx.broadcast_to(mx.arange(N, dtype=mx.int32), (1, 2, N))
OFFSET = mx.array([N], mx.int32)


@pytest.mark.parametrize("recent", [0, 3])
def test_the_rows_that_the_rule_keeps_come_back_whole(recent):
    scores = SCORES.copy()
    scores[0, 0, 7] = np.nan
    kept = fused_evict(KEYS, VALUES, mx.array(scores), POSITIONS, budget=6, n_sink=2, recent=recent, offset=OFFSET)
    keys, values, kept_scores, positions = map(np.array, kept)
    for head in range(2):
        ranked = np.where(np.isnan(scores[0, head]), -np.inf, scores[0, head])
        at = best_positions(ranked, list(range(N)), N, budget=6, n_sink=2, recent=recent)
        assert positions[0, head].tolist() == at
        np.testing.assert_array_equal(keys[0, head], np.array(KEYS)[0, head, at])
        np.testing.assert_array_equal(values[0, head], np.array(VALUES)[0, head, at])
        np.testing.assert_array_equal(kept_scores[0, head], scores[0, head, at])


@pytest.mark.parametrize(
    ("scores", "positions", "message"),
    [
        (mx.zeros((1, 2, N), mx.float16), POSITIONS, "scores must be float32"),
        (mx.zeros((1, 2, N), mx.int32), POSITIONS, "scores must be float32"),
        (mx.zeros((1, 2, N)), POSITIONS.astype(mx.float32), "positions int32"),
        (mx.zeros((1, 2, N - 1)), POSITIONS, r"must agree in \[B,H,n\]"),
    ],
)
def test_scores_and_positions_of_another_type_or_shape_are_refused(scores, positions, message):
    with pytest.raises(ValueError, match=message):
        fused_evict(KEYS, VALUES, scores, positions, budget=6)


@pytest.mark.parametrize("offset", [None, N, mx.array(N), mx.array([N, N])], ids=repr)
def test_a_recent_window_needs_the_offset_of_each_sequence(offset):
    with pytest.raises(ValueError, match=r"needs offset, the tokens seen by each sequence, int32 \[1\]"):
        fused_evict(KEYS, VALUES, mx.array(SCORES), POSITIONS, budget=6, recent=2, offset=offset)


def test_kernels_that_do_not_compile_give_way_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("velox_fn.engine.fused_evict")
    monkeypatch.setattr(module, "metal_available", lambda: True)
    monkeypatch.setattr(module, "kernel_failure", lambda: "unknown type name 'bfloat'")
    assert not module.resolve_metal(None)
    with pytest.raises(ValueError, match="unknown type name"):
        module.resolve_metal(True)


@pytest.mark.skipif(mx.metal.is_available(), reason="the kernels run where there is Metal")
def test_kernels_are_tried_before_they_are_trusted() -> None:
    kernel_failure.cache_clear()
    with pytest.warns(UserWarning, match="do not run here"):
        assert "metal" in str(kernel_failure()).lower()

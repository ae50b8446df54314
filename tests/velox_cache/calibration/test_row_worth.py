"""What rows turn out to be worth, against attention written out in numpy."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache.calibration import row_worth as module
from velox_cache.calibration.row_worth import AGES, N_SINK, row_worth
from velox_cache.introspection.observed_prefill import LayerQueries

H, G, D, D_V, N, ASKED = 2, 2, 6, 5, 24, 3
T = 2 * N + ASKED
SCALE = 0.7


def a_call(sinks):
    rng = np.random.default_rng(4)
    shapes = ((1, H * G, T, D), (1, H, T, D), (1, H, T, D_V))
    parts = [mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    terms = {"sinks": mx.array(rng.standard_normal(H * G).astype(np.float32))} if sinks else {}
    return LayerQueries(0, *parts, SCALE, terms)


def weights(call, query_head):
    """Attention [T,T] of one query head in float64."""
    queries, keys = np.array(call.queries, np.float64)[0, query_head], np.array(call.keys, np.float64)[0]
    logits = SCALE * queries @ keys[query_head // G].T
    exponentials = np.exp(np.where(np.tri(T, dtype=bool), logits, -np.inf))
    beside = np.exp(float(call.terms["sinks"][query_head].item())) if call.terms else 0
    return exponentials / (exponentials.sum(1, keepdims=True) + beside)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_worth_is_attention_times_what_it_moves(sinks):
    call, window = a_call(sinks), N // 4
    found = row_worth(call, N)
    rows = list(range(N_SINK, N - 2 * window))
    assert found.keys.shape == (H, len(rows), D)
    assert mx.array_equal(found.values, call.values[0, :, N_SINK : N - 2 * window])
    for head in range(H):
        values = np.array(call.values, np.float64)[0, head]
        moved = []
        for query_head in (head * G, head * G + 1):
            attention = weights(call, query_head)
            outputs = attention @ values
            moved.append(attention * np.linalg.norm(values[None] - outputs[:, None], axis=-1))
        both = np.stack(moved)
        natural = [np.log(both[:, row + window : N, row].mean(0).mean()) for row in rows]
        repeated = [np.log(both[:, T - N :, row].max()) for row in rows]
        np.testing.assert_allclose(found.worth[head], np.stack([natural, repeated], -1), rtol=2e-4, atol=2e-4)


def test_attention_by_age_counts_the_rows_of_the_text_that_are_no_sinks(monkeypatch):
    monkeypatch.setattr(module, "AGES", (2, 5, 9))
    call = a_call(sinks=False)
    found = row_worth(call, N)
    mean = np.stack([weights(call, h) for h in range(H * G)]).reshape(H, G, T, T).mean(1)
    for i, (least, most) in enumerate(((2, 5), (5, 9))):
        pairs = [(t, row) for t in range(N // 2, N) for row in range(N_SINK, N) if least <= t - row < most]
        wanted = [sum(mean[head, t, row] for t, row in pairs) for head in range(H)]
        np.testing.assert_allclose(found.by_age[:, i], wanted, rtol=1e-5)
        assert found.n_pairs[:, i].tolist() == [len(pairs)] * H
    assert len(AGES) > 2

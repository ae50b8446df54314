"""What rows turn out to be worth, against attention written out in numpy."""

import mlx.core as mx
import numpy as np
import pytest

from velox_cache.calibration import row_worth as module
from velox_cache.calibration.row_worth import AGES, N_SINK, row_worth
from velox_cache.introspection.observed_prefill import LayerQueries

H, G, D, D_V, N = 2, 2, 6, 5, 24
SCALE = 0.7


def a_call(before=0, sinks=False, n=N):
    rng = np.random.default_rng(4)
    shapes = ((1, H * G, n, D), (1, H, before + n, D), (1, H, before + n, D_V))
    parts = [mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    terms = {"sinks": mx.array(rng.standard_normal(H * G).astype(np.float32))} if sinks else {}
    return LayerQueries(0, *parts, SCALE, terms)


def weights(call, query_head):
    """Attention [S,n] of one query head in float64."""
    queries, keys = np.array(call.queries, np.float64)[0, query_head], np.array(call.keys, np.float64)[0]
    logits = SCALE * queries @ keys[query_head // G].T
    causal = np.tri(*logits.shape, k=logits.shape[1] - logits.shape[0], dtype=bool)
    exponentials = np.exp(np.where(causal, logits, -np.inf))
    beside = np.exp(float(call.terms["sinks"][query_head].item())) if call.terms else 0
    return exponentials / (exponentials.sum(1, keepdims=True) + beside)


@pytest.mark.parametrize("most_queries", [128, 8])
@pytest.mark.parametrize(("before", "sinks"), [(0, False), (0, True), (10, False)], ids=["", "sinks", "later block"])
def test_worth_is_later_attention_times_what_it_moves(monkeypatch, before, sinks, most_queries):
    monkeypatch.setattr(module, "MOST_QUERIES", most_queries)
    call, window, stride = a_call(before, sinks), N // 4, max(1, N // most_queries)
    found = row_worth(call)
    rows = list(range(before or N_SINK, before + N - 2 * window))
    assert mx.array_equal(found.keys, call.keys[0, :, rows[0] : rows[-1] + 1])
    assert mx.array_equal(found.values, call.values[0, :, rows[0] : rows[-1] + 1])
    for head in range(H):
        values = np.array(call.values, np.float64)[0, head]
        moved = []
        for query_head in (head * G, head * G + 1):
            attention = weights(call, query_head)
            outputs = attention @ values
            moved.append(attention * np.linalg.norm(values[None] - outputs[:, None], axis=-1))
        mean = np.mean(moved, axis=0)
        wanted = [
            np.log(np.mean([mean[t, row] for t in range(0, N, stride) if before + t - row >= window])) for row in rows
        ]
        np.testing.assert_allclose(found.worth[head], wanted, rtol=2e-4, atol=2e-4)


def test_attention_by_age_counts_late_queries_and_the_rows_that_have_a_worth(monkeypatch):
    monkeypatch.setattr(module, "AGES", (2, 5, 9))
    call = a_call()
    found = row_worth(call)
    mean = np.stack([weights(call, h) for h in range(H * G)]).reshape(H, G, N, N).mean(1)
    for i, (least, most) in enumerate(((2, 5), (5, 9))):
        pairs = [(t, r) for t in range(N // 2, N) for r in range(N_SINK, N - 12) if least <= t - r < most]
        wanted = [sum(mean[head, t, row] for t, row in pairs) for head in range(H)]
        np.testing.assert_allclose(found.by_age[:, i], wanted, rtol=1e-5)
        assert found.n_pairs[:, i].tolist() == [len(pairs)] * H
    assert len(AGES) > 2


def test_a_block_that_is_too_short_has_no_worth():
    assert row_worth(a_call(n=N_SINK)) is None


def test_every_row_is_seen_by_some_query_however_few_are_looked_at(monkeypatch):
    monkeypatch.setattr(module, "MOST_QUERIES", 2)
    found = row_worth(a_call(before=3, n=80))
    assert found.worth.min().item() > -20

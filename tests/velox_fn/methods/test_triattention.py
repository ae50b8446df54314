"""TriAttention against its formula, on keys before RoPE, in float64."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, simulated, tokens

from velox_fn import RopeSpec, rope_remap_positions, triattention

H, G, D = 2, 3, 8
ROPES = [
    RopeSpec(dims=8, base=50.0),
    RopeSpec(dims=4, base=20.0, traditional=True, first=2, scale=0.5),
    RopeSpec(dims=6, freqs=(1.0, 7.0, float("inf"))),
]


def pairs(vectors, rope):
    turned = vectors[..., rope.first : rope.first + rope.dims].astype(np.float64)
    if rope.traditional:
        return turned[..., 0::2] + 1j * turned[..., 1::2]
    return turned[..., : rope.dims // 2] + 1j * turned[..., rope.dims // 2 :]


def angles(rope):
    plain = (
        1 / rope.base ** (np.arange(0, rope.dims, 2) / rope.dims) if rope.freqs is None else 1 / np.array(rope.freqs)
    )
    return rope.scale * plain


def formula(keys, ages, centre, size, rope):
    """Mean over d of S(k, d) of keys [n,D] before RoPE at these ages, for one query head."""
    k, w = pairs(keys, rope), angles(rope)
    phase = np.angle(centre * np.conj(k))
    at = [np.cos(w * (np.array(ages)[:, None] + 2.0**j) + phase) for j in range(17)]
    trigonometric = (np.abs(centre) * np.abs(k) * np.mean(at, axis=0)).sum(-1)
    return trigonometric + ((size - np.abs(centre)) * np.abs(k)).sum(-1)


@pytest.fixture(params=ROPES, ids=range(len(ROPES)))
def rope(request):
    return request.param


@pytest.fixture
def centres(rope):
    queries = 0.7 + np.random.default_rng(3).standard_normal((H, G, 50, D))
    q = pairs(queries, rope)
    mean, size = q.mean(2), np.abs(q).mean(2)
    return np.stack([mean.real, mean.imag, size], axis=2).astype(np.float32)


@pytest.mark.parametrize("calls", [[60], [30, 1, 1, 1, 27], [1] * 60], ids=str)
def test_the_order_is_that_of_the_formula(rope, centres, calls):
    keys, values, _ = tokens(60)
    at = mx.arange(60)
    turned = np.array(rope_remap_positions(mx.array(keys), mx.array(0), at, rope))
    method = triattention(budget=14, n_sink=2, recent=3, rope=rope, query_centres=mx.array(centres))
    found = kept_after(method, turned, values, None, calls)
    for head in range(H):

        def score(held, old, block, head=head):
            ages = block[-1] - np.array(held)
            of_heads = [
                formula(keys[head, held], ages, real + 1j * imaginary, size, rope)
                for real, imaginary, size in centres[head].astype(np.float64)
            ]
            return np.max([(s - s.mean()) / (s.std() or 1) for s in of_heads], axis=0)

        assert found[head] == simulated(calls, score, budget=14, n_sink=2, recent=3)


def test_it_cannot_begin_without_centres_and_the_rotary_embedding():
    for given in ({}, {"rope": ROPES[0]}, {"query_centres": mx.ones((2, 1, 3, 4))}):
        with pytest.raises(ValueError, match=r"needs rope and query_centres.*velox calibrate"):
            triattention(**given).init(1, 2, 8)


@pytest.mark.parametrize(
    ("centres", "words"),
    [
        (mx.ones((2, 3, 4)), "must be"),
        (mx.ones((2, 1, 2, 4)), "must be"),
        (mx.ones((2, 1, 3, 5)), "4 pairs"),
        (mx.full((2, 1, 3, 4), mx.nan), "NaN"),
        ([[1.0]], "must be"),
    ],
)
def test_centres_that_do_not_fit_are_refused(centres, words):
    with pytest.raises(ValueError, match=words):
        triattention(rope=ROPES[0], query_centres=centres)


@pytest.mark.parametrize(("heads", "width"), [(3, 8), (2, 6)])
def test_centres_of_another_layer_are_refused(heads, width):
    with pytest.raises(ValueError, match="for this layer, got shape"):
        triattention(rope=ROPES[0], query_centres=mx.ones((2, 1, 3, 4))).init(1, heads, width)

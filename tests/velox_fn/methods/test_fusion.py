"""Fusion keeps what the standardised scores want, by maximum or by sum."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, tokens
from oracles import best_positions

from velox_fn import SCORERS, fusion, keydiff, kv, l2norm, qfilters
from velox_fn.engine import scorers
from velox_fn.engine.scorers import MLX_SUMS
from velox_fn.engine.store import used_rows

RNG = np.random.default_rng(11)
FILTERS, MEAN_KEYS = RNG.standard_normal((2, 2, 8)).astype(np.float32)
MEANS = np.array([[0.5, -0.1], [-0.3, 0.2]], np.float32)
DEVIATIONS = np.array([[3.0, 0.4], [2.0, 0.3]], np.float32)
SPLITS = [[40], [25, 1, 1, 13], [1] * 40]


def scores_of(keys, values):
    """The scores float64 [N] of every scorer for one head, by name, as the methods' papers have them."""
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    squares, value_squares = (keys**2).sum(-1), (values**2).sum(-1)
    return {
        "projection": lambda head: keys @ FILTERS[head].astype(np.float64),
        "key_difference": lambda head: -(keys @ MEAN_KEYS[head].astype(np.float64)) / np.sqrt(squares),
        "key_norm": lambda head: -squares,
        "value_norm": lambda head: value_squares,
        "norm_product": lambda head: squares * value_squares,
        "recency": lambda head: np.arange(len(keys), dtype=np.float64),
    }


def expected(keys, values, head, terms, combine, weights=((1, 1), (1, 1))):
    scores = scores_of(keys[head], values[head])
    units = [
        weights[head][t] * (scores[name](head) - float(MEANS[head, t])) / float(DEVIATIONS[head, t])
        for t, name in enumerate(terms)
    ]
    return np.maximum(*units) if combine == "max" else np.add(*units)


def arrays(terms=("projection", "key_difference"), **changes):
    taken = {"filters": FILTERS, "mean_keys": MEAN_KEYS, "means": MEANS, "deviations": DEVIATIONS}
    wanted = {"means", "deviations", *(name for term in terms for name in SCORERS[term].takes)}
    return {name: mx.array(array) for name, array in (taken | changes).items() if name in wanted | set(changes)}


def fused(**given):
    """A fusion of two terms, unless others are given."""
    return fusion(**{"terms": "projection+key_difference"} | given)


@pytest.mark.parametrize("calls", SPLITS, ids=["block", "mixed", "one by one"])
@pytest.mark.parametrize("combine", ["max", "sum"])
@pytest.mark.parametrize(
    "terms",
    [
        ("projection", "key_difference"),
        ("key_difference", "projection"),
        ("projection", "key_norm"),
        ("value_norm", "recency"),
        ("norm_product", "key_difference"),
    ],
    ids="+".join,
)
def test_rows_of_the_highest_fused_score_stay(terms, combine, calls):
    keys, values, _ = tokens(40)
    method = fused(budget=12, n_sink=2, recent=3, terms=terms, combine=combine, **arrays(terms))
    found = kept_after(method, keys, values, None, calls)
    for head in range(2):
        scores = expected(keys, values, head, terms, combine)
        assert found[head] == best_positions(scores, list(range(40)), 40, budget=12, n_sink=2, recent=3)


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_weights_multiply_the_standardised_scores(combine):
    weights = [[1.0, 0.25], [0.5, 3.0]]
    keys, values, _ = tokens(40)
    terms = ("projection", "key_difference")
    kept = kept_after(fused(budget=12, combine=combine, **arrays(weights=weights)), keys, values, None, [30, 1, 9])
    equal = kept_after(fused(budget=12, combine=combine, **arrays()), keys, values, None, [30, 1, 9])
    assert kept != equal
    for head in range(2):
        scores = expected(keys, values, head, terms, combine, weights)
        assert kept[head] == best_positions(scores, list(range(40)), 40, budget=12, n_sink=4)


def test_maximum_keeps_what_one_score_wants_and_sum_does_not():
    # Row 6 is the best by projection and far the worst by difference; row 7 is a little above the mean in both.
    keys = np.zeros((2, 12, 8), np.float32)
    keys[..., 2] = 1.0
    keys[:, 6, :2], keys[:, 6, 2] = [3.0, 9.0], 0.0
    keys[:, 7, :2] = [0.9, -0.9]
    direction = np.eye(8, dtype=np.float32)[[0, 0]], np.eye(8, dtype=np.float32)[[1, 1]]
    given = {"means": mx.zeros((2, 2)), "deviations": mx.array([[1.0, 0.2]] * 2)}
    for combine, row in (("max", 6), ("sum", 7)):
        method = fused(budget=1, n_sink=0, combine=combine, filters=mx.array(direction[0]),
                        mean_keys=mx.array(direction[1]), **given)  # fmt: skip
        assert kept_after(method, keys, keys, None, [12]) == [[row]] * 2


@pytest.mark.parametrize("combine", ["max", "sum"])
@pytest.mark.parametrize("out", ["weight", "deviation"])
@pytest.mark.parametrize(("term", "left"), [(0, "keydiff"), (1, "qfilters")])
def test_a_term_of_weight_or_deviation_zero_is_left_out(combine, out, term, left):
    # Most rows stay, and so rows below the mean compete: a term that counted as 0 would make them equal.
    keys, values, _ = tokens(40)
    weights, deviations = np.ones((2, 2), np.float32), DEVIATIONS.copy()
    (weights if out == "weight" else deviations)[:, term] = 0
    found = kept_after(
        fused(budget=32, combine=combine, **arrays(weights=weights, deviations=deviations)), keys, values, None, [40]
    )
    alone = {
        "qfilters": qfilters(budget=32, filters=mx.array(FILTERS)),
        "keydiff": keydiff(budget=32, mean_keys=mx.array(MEAN_KEYS)),
    }[left]
    assert found == kept_after(alone, keys, values, None, [40])


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_where_every_term_is_left_out_the_first_rows_stay_and_bad_ones_still_lose(combine):
    keys, values, _ = tokens(20)
    keys[:, 5, 0] = np.nan
    nothing_of_head_1 = mx.array(DEVIATIONS * [[1], [0]])
    found = kept_after(
        fused(budget=8, n_sink=2, combine=combine, **arrays(deviations=nothing_of_head_1)), keys, values, None, [20]
    )
    assert found[1] == [0, 1, 2, 3, 4, 6, 7, 8]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("weights", [[[1.0, 1.0]] * 2, [[0.0, 1.0]] * 2, [[1.0, 0.0]] * 2], ids=str)
@pytest.mark.parametrize("combine", ["max", "sum"])
@pytest.mark.parametrize(
    "terms",
    [
        ("projection", "recency"),
        ("recency", "projection"),
        ("projection", "key_difference"),
        ("value_norm", "key_difference"),
        ("recency", "value_norm"),
        ("norm_product", "recency"),
    ],
    ids="+".join,
)
def test_no_term_saves_a_row_whose_key_or_value_is_not_finite(terms, combine, weights, part, bad):
    keys, values, _ = tokens(30)
    {"keys": keys, "values": values}[part][:, [8, 25], 3] = bad
    method = fused(budget=24, n_sink=0, terms=terms, combine=combine, **arrays(terms, weights=np.float32(weights)))
    for calls in ([30], [1] * 30):
        assert not np.isin(kept_after(method, keys, values, None, calls), [8, 25]).any()


@pytest.mark.parametrize("method", ["qfilters", "keydiff", "l2norm"])
def test_a_single_term_keeps_what_its_method_keeps(method):
    keys, values, _ = tokens(60, seed=4)
    term = {"qfilters": "projection", "keydiff": "key_difference", "l2norm": "key_norm"}[method]
    alone = {
        "qfilters": lambda: qfilters(budget=20, filters=mx.array(FILTERS)),
        "keydiff": lambda: keydiff(budget=20, mean_keys=mx.array(MEAN_KEYS)),
        "l2norm": lambda: l2norm(budget=20),
    }[method]()
    given = arrays((term,), means=MEANS[:, :1], deviations=DEVIATIONS[:, :1])
    of_one = fused(budget=20, terms=term, **given)
    assert kept_after(of_one, keys, values, None, [50, 1, 9]) == kept_after(alone, keys, values, None, [50, 1, 9])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 24, 64, 80])
@pytest.mark.parametrize("name", SCORERS)
def test_a_score_has_the_same_bits_alone_in_a_block_and_compiled(name, width, dtype):
    rng = np.random.default_rng(width)
    keys, values = (mx.array(rng.standard_normal((2, 3, 33, width)), mx.float32).astype(dtype) for _ in range(2))
    directions = mx.array(rng.standard_normal((2, 3, width)), mx.float32)
    positions = mx.broadcast_to(mx.arange(33, dtype=mx.int32), (2, 1, 33))

    def score(k, v, at):
        return SCORERS[name].score(k, v, at, (directions,), MLX_SUMS)

    whole = np.array(score(keys, values, positions))
    compiled = mx.compile(score)
    for run in (score, compiled):
        alone = [run(keys[:, :, i : i + 1], values[:, :, i : i + 1], positions[..., i : i + 1]) for i in range(33)]
        np.testing.assert_array_equal(np.array(mx.concatenate(alone, axis=-1)), whole)


@pytest.mark.parametrize("combine", ["max", "sum"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_near_ties_fall_the_same_way_in_any_split(combine, dtype):
    rng = np.random.default_rng(0)
    keys = np.repeat(rng.standard_normal((1, 2, 1, 64)).astype(np.float32), 200, axis=2)
    at = rng.integers(64, size=(1, 2, 200, 1))
    np.put_along_axis(keys, at, np.nextafter(np.take_along_axis(keys, at, -1), np.float32(np.inf)), -1)
    block = mx.array(keys).astype(dtype)
    f, m = (mx.array(rng.standard_normal((2, 64)), mx.float32) for _ in range(2))
    method = fused(budget=60, recent=9, combine=combine, filters=f, mean_keys=m,
                    means=mx.array(MEANS), deviations=mx.array(DEVIATIONS))  # fmt: skip
    kept = []
    for calls in ([200], [1] * 200, [64, 64, 64, 8], [199, 1]):
        state, start = method.init(1, 2, 64, 64, dtype), 0
        for n_tokens in calls:
            part = block[:, :, start : start + n_tokens]
            state, _ = method.update(state, part, part)
            start += n_tokens
        kept.append(np.array(kv(state)[0].view(mx.uint16)))
    for other in kept[1:]:
        np.testing.assert_array_equal(other, kept[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"combine": "mean"}, "combine must be one of 'max', 'sum'"),
        ({"terms": "projection+query"}, "terms must be different names among projection"),
        ({"terms": "projection+projection"}, "terms must be different names"),
        ({"terms": ()}, "terms must be different names"),
        ({"terms": 3}, "terms must be different names"),
        ({"terms": "projection", "means": MEANS[:, :1], "deviations": DEVIATIONS[:, :1]}, "mean_keys is taken by none"),
        ({"means": MEANS[:, :1]}, "means must be .* a column for each of projection, key_difference"),
        ({"weights": np.ones((2, 3), np.float32)}, "weights must be .* a column for each"),
        ({"weights": np.array([[1, -1], [1, 1]], np.float32)}, "weights must not be negative"),
        ({"weights": np.array([[1, 1], [0, 0]], np.float32)}, "must not leave every term of a head out"),
        ({"deviations": -DEVIATIONS}, "deviations must not be negative"),
        ({"deviations": 0 * DEVIATIONS}, "deviations holds nothing but zeros: every row would score alike"),
        ({"mean_keys": 0 * MEAN_KEYS}, "mean_keys holds nothing but zeros"),
        ({"filters": FILTERS * [[1], [0]]}, "filters holds nothing but zeros for one head"),
        ({"weights": np.full((2, 2), np.nan, np.float32)}, "weights holds NaN"),
        ({"means": MEANS[:1]}, "one row for each KV head"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_construction(changes, message):
    given = {"filters": FILTERS, "mean_keys": MEAN_KEYS, "means": MEANS, "deviations": DEVIATIONS, **changes}
    with pytest.raises(ValueError, match=message):
        fused(**{name: mx.array(part) if isinstance(part, np.ndarray) else part for name, part in given.items()})


@pytest.mark.parametrize("missing", ["filters", "mean_keys", "means", "deviations"])
def test_without_its_arrays_a_state_cannot_begin(missing):
    method = fused(**{name: array for name, array in arrays().items() if name != missing})
    with pytest.raises(ValueError, match=f"needs {missing}, which come from a calibration"):
        method.init(1, 2, 8)


def test_terms_are_named_alike_as_a_string_and_as_a_tuple():
    one, other = fused(terms="key_norm+recency"), fused(terms=("key_norm", "recency"))
    assert one.settings == other.settings


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_a_large_block_scores_the_same_bits_head_by_head(combine, monkeypatch):
    keys, values = (mx.random.normal((3, 2, 1100, 64), key=mx.random.key(i)) for i in range(2))
    directions = {
        name: mx.random.normal((2, 64), key=mx.random.key(2 + i)) for i, name in enumerate(("filters", "mean_keys"))
    }
    method = fused(budget=2000, combine=combine, means=mx.array(MEANS), deviations=mx.array(DEVIATIONS), **directions)
    calls = []
    whole = scorers.minus_cosine
    monkeypatch.setattr(scorers, "minus_cosine", lambda keys, *rest: calls.append(keys.shape) or whole(keys, *rest))

    def ranks():
        state, _ = method.update(method.init(3, 2, 64), keys, values)
        return np.array(used_rows(state.store).ranks)

    apart = ranks()
    assert calls == [(1, 1, 1100, 64)] * 6
    monkeypatch.setattr(scorers, "_LARGE", 2**40)
    np.testing.assert_array_equal(ranks(), apart)
    assert calls[6:] == [(3, 2, 1100, 64)]

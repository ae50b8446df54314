"""What a comparison's rows say: intervals against numpy, tasks that count, tables and figures."""

import json
import random

import numpy as np
import pytest

from velox_cache.evaluation.compare import Row
from velox_cache.evaluation.figures import save_figures
from velox_cache.evaluation.markdown import to_markdown
from velox_cache.evaluation.paired import bootstrap, difference, mean_ratio, ratio
from velox_cache.evaluation.report import best_group, by_context, summary, tasks_that_count, to_json
from velox_cache.evaluation.traces import TRACES, distinct_share, make_trace

RNG = np.random.default_rng(3)
ONE, OTHER = RNG.normal(1.0, 0.3, 12), RNG.normal(2.0, 0.3, 12)


def resampled(statistic, *samples, n=2000):
    """Percentile interval, one draw at a time."""
    drawn = np.random.default_rng(0).integers(0, len(samples[0]), (n, len(samples[0])))
    return np.quantile([statistic(*(np.array(sample)[index] for sample in samples)) for index in drawn], [0.025, 0.975])


def test_a_difference_is_resampled_context_by_context():
    found = difference(ONE, OTHER)
    assert found.value == pytest.approx(float(np.mean(ONE - OTHER)))
    low, high = resampled(lambda a, b: np.mean(a - b), ONE, OTHER)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found == difference(ONE, OTHER)


def test_a_ratio_is_that_of_the_means():
    found = ratio(ONE, OTHER)
    assert found.value == pytest.approx(np.mean(ONE) / np.mean(OTHER))
    low, high = resampled(lambda a, b: np.mean(a) / np.mean(b), ONE, OTHER)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_ratios_of_several_budgets_are_averaged_geometrically():
    found = ratio([[1.0] * 5, [8.0] * 5], [[4.0] * 5, [4.0] * 5])
    assert (found.value, found.low, found.high) == (pytest.approx((0.25 * 2.0) ** 0.5),) * 3


def test_every_context_weighs_the_same_in_a_mean_of_ratios():
    found = mean_ratio(np.abs(ONE), np.abs(OTHER))
    assert found.value == pytest.approx(np.exp(np.mean(np.log(np.abs(ONE)) - np.log(np.abs(OTHER)))))
    assert mean_ratio([1.0, 4.0, 1.0, 4.0], [4.0, 1.0, 4.0, 1.0]).value == pytest.approx(1)


def test_a_pairing_shares_its_draws():
    assert difference(ONE, ONE + 1).high == pytest.approx(-1)  # the contexts' own spread falls out


def test_few_contexts_have_no_interval():
    found = difference([1.0, 2.0], [3.0, 5.0])
    assert np.isnan([found.low, found.high]).all()
    assert found.text() == "-2.50"


def test_a_pairing_of_other_contexts_is_refused():
    with pytest.raises(ValueError, match="the same contexts on all sides"):
        bootstrap(lambda a, b: a.mean(-1), [1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("values", "group"),
    [
        ({"a": ONE, "b": OTHER}, {"a"}),
        ({"a": ONE, "b": ONE[::-1], "c": OTHER}, {"a", "b"}),
        ({"a": ONE, "b": ONE[::-1]}, set()),  # nothing is better than anything
        ({"a": ONE[:2], "b": OTHER[:2]}, set()),  # too few to say
    ],
)
def test_bold_is_what_nothing_is_better_than(values, group):
    assert best_group(values, lower=True) == group
    assert best_group({name: -np.array(value) for name, value in values.items()}, lower=False) == group


def cell(arm, share, number, kl, right, kind="prose", measure="context"):
    """A cell with one needle and one question that nobody can answer."""
    answers = [
        {"task": "needle", "logprobs": [-1.0 if right else -3.0, -2.0, -4.0, -4.0], "greedy": right},
        {"task": "two_hop", "logprobs": [-3.0, -2.0, -4.0, -4.0], "greedy": False},
    ]
    values = {"kl_divergence": kl, "agreement": 0.5, "answers": answers}
    return Row(measure, kind, number, arm, share, 8 if share else None, values)


def trace(arm, share, slope):
    values = {"kl_divergence": [slope * i for i in range(1, 9)], "agreement": [0.5] * 8, "distinct": 0.75}
    return Row("trace", "accounts", 0, arm, share, 8 if share else None, values)


ROWS = [
    row
    for number in range(8)
    for row in (
        cell("full cache", "", number, 0.0, True),
        cell("good", "1/4", number, 0.1 + 0.01 * number, True),
        cell("streaming_llm", "1/4", number, 0.4 + 0.01 * number, number % 2 == 0),
        cell("oracle", "1/4", number, 0.01, True),
    )
]
TRACE_ROWS = [trace("full cache", "", 0.0), trace("good", "1/4", 0.1)]


def test_a_task_counts_where_the_full_cache_is_clearly_above_chance():
    assert tasks_that_count(ROWS, "full cache") == {"needle": True, "two_hop": False}
    assert tasks_that_count([row for row in ROWS if row.seed < 2], "full cache")["needle"] is False  # luck would do


def test_the_summary_is_one_line_per_arm():
    found = summary(ROWS, "full cache", "streaming_llm")
    assert list(found) == ["good", "streaming_llm", "oracle"]
    assert found["good"]["kl"].value == pytest.approx(0.135 / 0.435)
    assert (found["streaming_llm"]["answers"].value, found["good"]["answers"].value) == (0.5, 1.0)
    assert found["streaming_llm"]["margin"].value == pytest.approx(-1.0)


def test_an_arm_that_lacks_a_context_is_named():
    with pytest.raises(ValueError, match="good 1/4 has not run in the same contexts"):
        by_context([row for row in ROWS if (row.arm, row.seed) != ("good", 3)], "context", lambda values: 0.0)


def test_the_tables_mark_what_the_interval_says():
    table = to_markdown([*ROWS, *TRACE_ROWS], "full cache", "streaming_llm")
    assert "| good | 1/4 | **0.135** | **0.135** |" in table
    assert "| streaming_llm | 1/4 | 0.435 | 0.435 |" in table
    assert "| *oracle* (ceiling) | 1/4 | 0.010 | 0.010 |" in table
    assert "which do not count: two_hop 0%" in table
    assert "| streaming_llm | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 50% [" in table
    assert "| good | 1/4 | 0.100 |" in table


def test_the_query_aware_column_comes_from_its_own_measurement():
    aware = [cell(row.arm, row.share, row.seed, 0.0, row.arm != "streaming_llm", measure="aware") for row in ROWS]
    [line] = [one for one in to_markdown([*ROWS, *aware], "full cache").split("\n") if one.startswith("| good |")][:1]
    assert line.endswith("| 100% |")


def test_figures_are_drawn_for_what_there_is_and_titles_fit(tmp_path):
    pytest.importorskip("matplotlib")
    title = "a model of a long name, 4096 tokens, report half, " * 4
    paths = save_figures([*ROWS, *TRACE_ROWS], "full cache", tmp_path, title)
    assert [path.name for path in paths] == ["contexts.png", "traces.png"]
    assert [path.name for path in save_figures(TRACE_ROWS, "full cache", tmp_path, "m")] == ["traces.png"]


def test_json_holds_all_rows_and_what_made_them():
    found = json.loads(to_json(ROWS, {"model": "m"}))
    assert found["about"] == {"model": "m"}
    assert [Row(**row) for row in found["rows"]] == ROWS


@pytest.mark.parametrize(
    ("tokens", "share"), [([1, 2, 3, 4, 5, 6], 1.0), ([1, 2, 3, 4] * 3, 4 / 9), ([1, 1, 1, 1, 1], 0.5), ([1, 2], 1.0)]
)
def test_loops_have_few_distinct_grams(tokens, share):
    assert distinct_share(tokens) == share


def test_the_steps_of_a_trace_add_up(tokenizer):
    text = "".join(line for _, line in zip(range(40), TRACES["accounts"](random.Random(1)), strict=False))
    for sum_ in text.replace("\n", " ").split(". "):
        if " = " in sum_:
            left, right = sum_.split(": ")[-1].rstrip(".").split(" = ")
            assert eval(left) == int(right)


def test_a_trace_has_its_length_and_its_half(tokenizer):
    one, other = (make_trace(tokenizer, "boxes", half, 0, 300) for half in ("choice", "report"))
    assert len(one) == len(other) == 300
    assert one != other

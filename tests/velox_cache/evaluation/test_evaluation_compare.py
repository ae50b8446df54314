"""The comparison: what runs, what is found on disk again, and what the report says."""

import csv
import dataclasses
import io
import json
import math

import pytest

from velox_cache.evaluation.cells import Cells
from velox_cache.evaluation.compare import Contender, Measurement, Row, compare
from velox_cache.evaluation.figures import save_figures
from velox_cache.evaluation.markdown import to_markdown
from velox_cache.evaluation.measurements import Workload, reading
from velox_cache.evaluation.paired import paired_difference
from velox_cache.evaluation.report import (
    mean_perplexity,
    spread,
    task_verdicts,
    to_csv,
    to_json,
)
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.harness.texts import TEXTS, passages, text_named


def contenders(*arms):
    return [Contender(arm, list) for arm in (FULL, *arms)]


A, B = Arm("a", "l2norm", {"budget": 8}), Arm("b", "l2norm", {"budget": 8, "recent": 2})


class Counted:
    """A measurement that notes whom it ran for."""

    def __init__(self, **options):
        self.ran: list[list[str]] = []
        self.measurement = Measurement("perplexity", "text", 0, {"n": 1}, 10, self.run, **options)

    def run(self, contenders, advance):
        self.ran.append([one.arm.label for one in contenders])
        advance(4)
        return [{"value": one.arm.label} for one in contenders]


def test_every_arm_gets_its_own_result(tmp_path):
    rows = compare([Counted().measurement], contenders(A, B), Cells(tmp_path, {}))
    assert [(row.arm, row.values["value"]) for row in rows] == [(x, x) for x in ("full cache", "a", "b")]


def test_what_is_on_disk_is_not_measured_again(tmp_path):
    counted = Counted()
    first = compare([counted.measurement], contenders(A, B), Cells(tmp_path, {}))
    assert compare([counted.measurement], contenders(A, B), Cells(tmp_path, {})) == first
    assert counted.ran == [["full cache", "a", "b"]]


@pytest.mark.parametrize(("compares", "ran"), [(False, ["b"]), (True, ["full cache", "b"])])
def test_a_new_arm_is_measured_alone_or_next_to_its_reference(tmp_path, compares, ran):
    counted = Counted(compares=compares)
    compare([counted.measurement], contenders(A), Cells(tmp_path, {}))
    compare([counted.measurement], contenders(A, B), Cells(tmp_path, {}))
    assert counted.ran[1] == ran


@pytest.mark.parametrize("change", ["identity", "sizes", "settings"])
def test_numbers_of_other_conditions_are_not_reused(tmp_path, change):
    counted = Counted()
    compare([counted.measurement], contenders(A), Cells(tmp_path, {"model": "m"}))
    measurement = dataclasses.replace(counted.measurement, sizes={"n": 2 if change == "sizes" else 1})
    arm = Arm("a", "l2norm", {"budget": 8, "n_sink": 1}) if change == "settings" else A
    compare([measurement], contenders(arm), Cells(tmp_path, {"model": "other" if change == "identity" else "m"}))
    assert len(counted.ran) == 2


def test_changed_defaults_of_a_method_are_other_conditions(tmp_path, tiny_model):
    model, counted = tiny_model(), Counted()
    full = Contender(FULL, cache_maker(model, FULL))
    once, later = (Arm("a", "l2norm", {"budget": 8, "recent": recent}) for recent in (1, 2))
    for default in (once, later):  # A leaves recent to install
        compare([counted.measurement], [full, Contender(A, cache_maker(model, default))], Cells(tmp_path, {}))
    assert len(counted.ran) == 2


def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path):
    counted, after = Counted(), Counted()

    def stop(contenders, advance):
        raise KeyboardInterrupt

    second = dataclasses.replace(after.measurement, seed=1)
    with pytest.raises(KeyboardInterrupt):
        compare([counted.measurement, dataclasses.replace(second, run=stop)], contenders(A), Cells(tmp_path, {}))
    compare([counted.measurement, second], contenders(A), Cells(tmp_path, {}))
    assert (len(counted.ran), len(after.ran)) == (1, 1)


def test_progress_counts_every_token_whether_measured_or_found(tmp_path):
    done: list[int] = []
    for _ in range(2):
        done.clear()
        compare([Counted().measurement], contenders(A), Cells(tmp_path, {}), lambda what, n: done.append(n))
        assert sum(done) == 10


def test_the_full_cache_comes_first(tmp_path):
    with pytest.raises(ValueError, match="first contender"):
        compare([], contenders(A)[1:], Cells(tmp_path, {}))


def test_two_arms_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="differ"):
        compare([], contenders(A, A), Cells(tmp_path, {}))


def test_a_damaged_cell_is_named(tmp_path):
    cells = Cells(tmp_path, {})
    cells.put({"measure": "m"}, {"x": 1})
    next(tmp_path.iterdir()).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        cells.get({"measure": "m"})


def test_cells_bring_numbers_back_exactly(tmp_path):
    Cells(tmp_path, {}).put({"a": 1}, {"x": 0.1 + 0.2})
    assert Cells(tmp_path, {}).get({"a": 1}) == {"x": 0.1 + 0.2}
    assert Cells(tmp_path, {}).get({"a": 2}) is None


def read_row(arm, budget, losses_and_more, seed=0):
    loss, divergence = losses_and_more
    values = {"perplexity": math.exp(loss), "mean_loss": loss, "kl_divergence": divergence, "agreement": 0.5}
    return Row("perplexity", "prose", seed, arm, budget, {**values, "compression": 4.0})


def task_row(arm, budget, score, seed=0, subject="needle"):
    values = {"score": score, "floor": 0.0, "evidence_kept": 0.25, "compression": 4.0, "reply": 'a, "b"'}
    return Row("task", subject, seed, arm, budget, values)


ROWS = [
    read_row("full cache", None, (1.0, 0.0)),
    read_row("qfilters", 8, (1.5, 0.1)),
    read_row("fallback", 8, (2.0, 0.2)),
    *(task_row("full cache", None, score, seed) for seed, score in enumerate([1, 0])),
    *(task_row("qfilters", 8, score, seed) for seed, score in enumerate([0, 0])),
    task_row("full cache", None, 0.1, subject="two_hop"),
    task_row("qfilters", 8, 0.9, subject="two_hop"),
    Row(
        "attention",
        "prose",
        0,
        "full cache",
        None,
        {
            name: {"mean": mean, "sign_correct": 0.5, "per_head": [[mean, mean]]}
            for name, mean in (("a", 0.1), ("b", 0.7))
        },
    ),
    Row("kept", "prose", 0, "qfilters", 8, {"kept_share": [[1.0, 0.0, 0.5]]}),
]


def test_perplexity_over_passages_weighs_every_token_alike():
    rows = [read_row("full cache", None, (1.0, 0.0), 0), read_row("full cache", None, (3.0, 0.0), 1)]
    assert mean_perplexity(rows)["prose", "full cache", None] == pytest.approx(math.exp(2.0))


def test_spread_is_the_sample_deviation():
    assert (spread([1.0, 3.0]).mean, spread([1.0, 3.0]).deviation) == (2.0, pytest.approx(math.sqrt(2)))
    assert spread([5.0]).text() == "5.00"


def test_tasks_that_the_full_cache_cannot_do_are_marked():
    assert task_verdicts(ROWS, "full cache") == {"needle": True, "two_hop": False}
    assert "not discriminative" in to_markdown(ROWS, "full cache")


def test_a_task_that_the_methods_were_left_out_of_has_empty_cells():
    rows = [row for row in ROWS if (row.subject, row.arm) != ("two_hop", "qfilters")]
    assert "| qfilters | 8 | 0.00 ± 0.00 (evidence 25%) |  |" in to_markdown(rows, "full cache")


def test_paired_difference_is_that_of_the_same_prompts():
    found = paired_difference([1, 1, 0, 1], [1, 0, 0, 0])  # differences 0, 1, 0, 1
    assert (found.mean, found.n) == (0.5, 4)
    assert found.margin == pytest.approx(1.96 * math.sqrt(1 / 3) / 2)
    assert found.points() == "+50 ± 57"


def test_a_difference_that_rounds_to_nothing_has_no_minus():
    assert paired_difference([0.0, 0.992], [0.0, 1.0]).points() == "+0 ± 1"


def test_paired_difference_of_other_prompts_is_refused():
    with pytest.raises(ValueError, match="the same prompts on both sides, got 2 and 1"):
        paired_difference([1, 0], [1])


def test_the_paired_table_sets_each_arm_beside_the_full_cache_and_a_named_one():
    def task(arm, budget, *scores):
        values = {"floor": 0.0, "evidence_kept": 1.0}
        return [Row("task", "needle", seed, arm, budget, {**values, "score": one}) for seed, one in enumerate(scores)]

    rows = task("full cache", None, 1.0, 1.0) + task("a", 8, 1.0, 0.0) + task("b", 8, 0.0, 0.0)
    table = to_markdown(rows, "full cache", "b")
    assert "| needle | 8 | a | -50 ± 98 | +50 ± 98 | 2 |" in table
    assert "| needle | 8 | b | -100 ± 0 | +0 ± 0 | 2 |" in table


def test_figures_leave_out_what_was_not_run(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row for row in ROWS if (row.subject, row.arm) != ("two_hop", "qfilters")]
    assert "tasks.png" in {path.name for path in save_figures(rows, "full cache", tmp_path, "m")}


def test_the_table_shows_winner_gap_and_order():
    table = to_markdown(ROWS, "full cache", "fallback")
    closed = (math.exp(2) - math.exp(1.5)) / (math.exp(2) - math.exp(1))
    assert f"| prose | 8 | qfilters | **{math.exp(1.5):.2f}** | {math.exp(1.5):.2f} | {closed:.0%} |" in table
    assert f"| prose | 8 | fallback | {math.exp(2):.2f} | {math.exp(2):.2f} | 0% |" in table
    assert table.index("| b | +0.700") < table.index("| a | +0.100")
    assert "| full cache | - | 0.50 ± 0.71 |" in table


def test_csv_has_a_line_for_each_arm_and_seed():
    lines = list(csv.DictReader(io.StringIO(to_csv(ROWS))))
    assert len(lines) == 9
    assert lines[3]["reply"] == 'a, "b"'
    assert float(lines[1]["perplexity"]) == math.exp(1.5)


def test_json_holds_all_rows_and_what_made_them():
    found = json.loads(to_json(ROWS, {"model": "m"}))
    assert found["about"] == {"model": "m"}
    assert [Row(**row) for row in found["rows"]] == ROWS


def test_figures_are_drawn_for_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    paths = save_figures(ROWS, "full cache", tmp_path, "m")
    assert [path.name for path in paths] == ["perplexity.png", "tasks.png", "attention.png", "kept.png"]
    assert all(path.stat().st_size > 5000 for path in paths)
    assert [path.name for path in save_figures(ROWS[:3], "full cache", tmp_path, "m")] == ["perplexity.png"]


def test_reading_refuses_an_arm_that_keeps_more_than_its_budget(tiny_model, tokenizer, tmp_path):
    model, work = tiny_model(), Workload(texts=("code",), n_context=40, n_scored=4, n_passages=1)
    warming = Arm("warming", "qfilters", {"budget": 16, "calib_tokens": 64})  # keeps all until it has seen 64 keys
    ready = [Contender(arm, cache_maker(model, arm)) for arm in (FULL, warming)]
    with pytest.raises(ValueError, match="warming keeps 43 of 43 rows"):
        compare(reading(model, tokenizer, work), ready, Cells(tmp_path, {}))


def test_passages_are_spread_from_first_to_last():
    assert passages(list(range(10)), 4, 2) == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert passages(list(range(10)), 4, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="do not fit"):
        passages(list(range(10)), 10, 2)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_there(name):
    assert len(text_named(name)) > 5000


def test_a_text_may_be_a_file(tmp_path):
    (tmp_path / "own.txt").write_text("my text")
    assert text_named(str(tmp_path / "own.txt")) == "my text"
    with pytest.raises(ValueError, match="documentation, licence, code"):
        text_named("nothing")


def test_a_comparison_of_a_model_gives_the_same_numbers_twice(tiny_model, tokenizer, tmp_path):
    model, work = tiny_model(), Workload(texts=("code",), n_context=40, n_scored=10)
    arms = [FULL, Arm("a", "streaming_llm", {"budget": 16}), Arm("b", "h2o", {"budget": 20, "grace": 4})]
    ready = [Contender(arm, cache_maker(model, arm)) for arm in arms]
    first, second = (compare(reading(model, tokenizer, work), ready, Cells(tmp_path / str(i), {})) for i in range(2))
    assert first == second
    assert [row.values["rows_kept"] for row in first[:3]] == [49, 16, 20]
    assert first[0].values["kl_divergence"] == 0

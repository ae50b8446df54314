"""The benchmark measures what it says and writes what it measured. Nothing here depends on how fast anything is."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from velox_cache.bench import report as reports
from velox_cache.bench import rounds
from velox_cache.bench.arms import Shape, caches, decode_step
from velox_cache.bench.decoding import decoding_in_turns
from velox_cache.bench.end_to_end import end_to_end
from velox_cache.bench.operations import Plan, decode_over_budget, prefill, selection
from velox_cache.bench.report import Report, changes, read, write
from velox_cache.bench.rounds import Comparison, Timing, compare
from velox_cache.bench.tier_steps import tier_steps
from velox_cache.cli.main import main
from velox_cache.installation.installed import InstalledCaches
from velox_fn import METHODS

SMALL = Shape(n_kv_heads=2, head_dim=8)


class Clock:
    """Time that passes only when an arm says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.now / 4


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


def taking(clock, seconds, log=None, label=""):
    lasts = iter(seconds)

    def call():
        clock.now += next(lasts)
        if log is not None:
            log.append(label)

    return call


def test_a_ratio_is_that_of_the_medians(clock):
    arms = {"one": taking(clock, [9, 9, 1, 2, 3]), "other": taking(clock, [9, 9, 8, 4, 100])}
    other = compare("", "", arms, rounds=3).timings[1]
    assert (other.median_us, other.ratio) == (8e6, 4.0)


def test_processor_time_is_told_apart_from_the_clock(clock):
    arms = {"one": taking(clock, [9, 9, 1, 2, 3]), "other": taking(clock, [9, 9, 8, 4, 100])}
    other = compare("", "", arms, rounds=3).timings[1]
    assert (other.cpu_us, other.cpu_ratio) == (pytest.approx(2e6), pytest.approx(4.0))


def test_the_spread_is_that_of_the_rounds_own_ratios(clock):
    # a slow round slows both, and the ratio of that round stays 2
    arms = {"one": taking(clock, [1, 1, 1, 50, 1]), "other": taking(clock, [1, 1, 2, 100, 2])}
    other = compare("", "", arms, rounds=3).timings[1]
    assert (other.ratio_low, other.ratio_high) == (2.0, 2.0)


def test_time_is_that_of_one_call_and_warming_up_does_not_count(clock):
    arms = {"one": taking(clock, [1000, 1000, 1, 2, 3, 4, 5, 6])}
    assert compare("", "", arms, rounds=2, calls=3).reference.median_us == pytest.approx(3.5e6)


def test_every_arm_takes_its_turn_in_every_round(clock):
    log = []
    arms = {label: taking(clock, [1] * 30, log, label) for label in "abc"}
    compare("", "", arms, rounds=10)
    turns = [log[at : at + 3] for at in range(6, 36, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1


def test_every_method_is_compared_once():
    families = [set(caches(SMALL, 64, static=static)) & set(METHODS) for static in (True, False)]
    assert families[0] | families[1] == set(METHODS)
    assert not families[0] & families[1]


@pytest.mark.parametrize("name", METHODS)
def test_a_decode_step_over_budget_overwrites_the_dead_row(name):
    made = []

    def make():
        made.append({**caches(SMALL, 64, static=True), **caches(SMALL, 64, static=False)}[name]())
        return made[-1]

    decode_step(make, SMALL, 66)()
    assert made[0].record.store.filled == 65


def test_the_rotating_cache_is_the_reference_of_decoding_over_budget():
    comparison = decode_over_budget(SMALL, 64, rounds=2)
    assert comparison.reference.label == "RotatingKVCache"
    assert {timing.label for timing in comparison.timings} >= {"qfilters", "l2norm", "streaming_llm"}


def test_prefill_and_selection_have_a_floor():
    assert prefill(SMALL, 64, 2, static=True).reference.label == "floor"
    assert selection(SMALL, 64, 2).reference.label == "argpartition"


def test_a_plan_takes_every_dtype_with_every_batch_size():
    plan = Plan(dtypes=(mx.float16, mx.bfloat16), batches=(1, 4))
    assert [(shape.dtype, shape.batch) for shape in plan.shapes] == [
        (mx.float16, 1),
        (mx.float16, 4),
        (mx.bfloat16, 1),
        (mx.bfloat16, 4),
    ]


def test_bytes_of_a_row_are_those_of_key_and_value_in_all_heads():
    assert Shape(batch=2, n_kv_heads=8, head_dim=128).row_bytes == 2 * 2 * 8 * 128 * 2


def report_of(ratio, label="qfilters"):
    reference = Timing("RotatingKVCache", 10.0, 1.0, 1.0, 1.0, 10.0, 1.0)
    timings = (reference, Timing(label, 10.0 * ratio, ratio, ratio, ratio, 10.0 * ratio, ratio))
    return Report({"cores": 2}, (Comparison("decode over budget", "budget 512", timings),))


def test_a_report_comes_back_from_its_file(tmp_path):
    report = report_of(2.5)
    write(report, tmp_path / "deep" / "bench.json")
    assert read(tmp_path / "deep" / "bench.json") == report


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ValueError, match=r"velox bench --json"):
        read(tmp_path / "bench.json")


def test_a_report_of_another_format_is_refused(tmp_path):
    write(replace(report_of(2.0), format=99), tmp_path / "bench.json")
    with pytest.raises(ValueError, match="format 99"):
        read(tmp_path / "bench.json")


def test_a_ratio_stands_beside_the_committed_one():
    (line,) = changes(report_of(2.1), report_of(2.0))
    assert "2.10 (2.00 committed)" in line
    assert "slower" not in line


def test_a_much_larger_ratio_is_marked():
    (line,) = changes(report_of(4.0), report_of(2.0))
    assert "slower" in line


def test_what_only_one_report_holds_is_left_out():
    assert list(changes(report_of(2.0, "tova"), report_of(2.0, "h2o"))) == []


def test_the_command_writes_its_report_and_never_fails_on_a_slow_machine(tmp_path, monkeypatch, capsys):
    slow, fast = tmp_path / "now.json", tmp_path / "before.json"
    write(report_of(0.001), fast)
    monkeypatch.setattr("velox_cache.bench.operations.measure", lambda plan: report_of(100.0).comparisons)
    monkeypatch.setattr(reports, "copy_bandwidth", lambda: 1e9)
    assert main(["bench", "--quick", "--against", str(fast), "--json", str(slow)]) == 0
    assert json.loads(slow.read_text())["comparisons"][0]["timings"][1]["ratio"] == 100.0
    assert "slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", [["--budgets", "0"], ["--budgets", "many"], ["--dtypes", "int8"], ["--methods", "none"]]
)
def test_options_that_mean_nothing_are_refused(option):
    with pytest.raises(SystemExit):
        main(["bench", *option])


def test_caches_decode_in_turns_beside_the_rotating_one(tiny_model, tokenizer):
    model = tiny_model()
    [comparison] = decoding_in_turns(
        model, tokenizer, budgets=(24,), rounds=2, methods=("qfilters", "h2o"), advance=lambda label: None
    )
    assert [timing.label for timing in comparison.timings] == ["RotatingKVCache", "qfilters", "h2o"]
    assert not isinstance(model.__dict__.get("make_cache"), InstalledCaches)


def test_heads_in_tiers_decode_in_turns_beside_one_budget(tiny_model, tokenizer):
    model = tiny_model()
    comparison = tier_steps(model, tokenizer, budget=24, rounds=2)
    assert [timing.label for timing in comparison.timings] == ["one budget", "two tiers", "three tiers"]
    assert not isinstance(model.__dict__.get("make_cache"), InstalledCaches)


def test_only_the_methods_that_are_asked_for_run_and_all_take_turns(tiny_model, tokenizer, monkeypatch):
    def some_tokens(model, tokenizer, prompt, max_tokens, prompt_cache):
        for start in range(0, 90, 30):
            mx.eval(model(mx.array(prompt[start : start + 30])[None], cache=prompt_cache))
            yield start

    monkeypatch.setattr("velox_cache.bench.end_to_end.stream_generate", some_tokens)
    seen = []
    runs = end_to_end(tiny_model(), tokenizer, budgets=(24,), rounds=2, methods=("l2norm",), advance=seen.append)
    assert [run.label for run in runs] == ["KVCache", "RotatingKVCache", "l2norm"]
    assert seen == ["KVCache, None"] * 2 + ["RotatingKVCache, 24", "l2norm, 24"] * 2

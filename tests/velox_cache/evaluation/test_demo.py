"""The demo's comparison, on a tiny model and, briefly, on a real one."""

import io

import pytest
from letters import Letters
from rich.console import Console

from velox_cache import calibrate
from velox_cache.calibration.texts import calibration_texts, filler_text, held_out_text
from velox_cache.evaluation import Arm
from velox_cache.evaluation.demo import Workload, compare_arms, comparison_work, default_arms, results_table
from velox_cache.installation.installed import InstalledCaches
from velox_fn.registry import METHODS

SMALL = Workload(n_filler=60, n_answer=6, n_context=40, n_scored=10)


def compared(model, arms, advance=lambda what, work: None):
    calibration = calibrate(model, Letters(), ["some text " * 40], progress=False)
    return compare_arms(model, Letters(), calibration, arms, SMALL, advance)


@pytest.fixture
def results(tiny_model):
    return compared(tiny_model(), default_arms([24, 16]))


def test_the_full_cache_agrees_with_itself(results):
    assert results[0].arm.method is None
    assert results[0].reading.fidelity.agreement == 1
    assert results[0].answer.usage.compression == 1
    assert results[0].answer.evidence_kept == 1


def test_bounded_arms_are_compared_with_the_full_cache(results):
    assert all(result.reading.fidelity.kl_divergence > 0 for result in results[1:])


def test_every_bounded_arm_keeps_its_budget(results):
    budgets = [result.arm.settings["budget"] for result in results[1:]]
    assert [result.answer.usage.rows_kept for result in results[1:]] == budgets
    assert all(result.answer.usage.compression > 1 for result in results[1:])


def test_a_budget_that_holds_everything_changes_nothing(tiny_model):
    full, roomy = compared(tiny_model(), [Arm("full"), Arm("roomy", "qfilters", {"budget": 5000})])
    assert roomy.answer.reply == full.answer.reply
    assert roomy.reading.perplexity == pytest.approx(full.reading.perplexity, rel=1e-5)
    assert roomy.reading.fidelity.kl_divergence == pytest.approx(0, abs=1e-6)


def test_the_model_has_its_own_caches_back_afterwards(tiny_model):
    model = tiny_model()
    compared(model, default_arms([16]))
    assert not isinstance(model.__dict__.get("make_cache"), InstalledCaches)


def test_progress_ends_at_the_announced_work(tiny_model):
    done = []
    compared(tiny_model(), default_arms([16]), lambda what, work: done.append((what, work)))
    assert sum(work for _, work in done) == comparison_work(Letters(), SMALL)
    assert list(dict.fromkeys(what for what, _ in done)) == [
        "reading a long prompt",
        "answering from 3 caches side by side",
        "reading a passage",
        "predicting it from 3 caches side by side",
    ]


def test_the_first_arm_must_be_the_full_cache(tiny_model):
    with pytest.raises(ValueError, match="full cache"):
        compared(tiny_model(), default_arms([16])[1:])


def test_arms_are_methods_times_budgets():
    arms = default_arms([24, 16])
    assert {arm.method for arm in arms[1:]} <= set(METHODS)
    assert [arm.settings for arm in arms if arm.method == "fusion"] == [
        {"budget": 24, "shares": "auto"},
        {"budget": 16, "shares": "auto"},
    ]


def test_the_table_has_a_row_for_each_arm(results):
    console = Console(width=200, file=io.StringIO())
    console.print(results_table(results))
    shown = console.file.getvalue()
    assert all(result.arm.label in shown for result in results)
    assert "found" in shown or "lost" in shown


def test_the_embedded_texts_do_not_overlap():
    lines = [
        {line for line in text.splitlines() if len(line) > 40}
        for text in ("\n".join(calibration_texts()), held_out_text(), filler_text())
    ]
    assert all(lines)
    assert sum(map(len, lines)) == len(lines[0] | lines[1] | lines[2])


@pytest.mark.real_model
def test_a_small_demo_on_a_real_model(smollm2):
    model, tokenizer = smollm2
    calibration = calibrate(model, tokenizer, calibration_texts(), max_tokens=256, progress=False)
    workload = Workload(n_filler=1200, n_answer=24, n_context=150, n_scored=16)
    full, bounded = compare_arms(
        model, tokenizer, calibration, [Arm("full"), Arm("bounded", "qfilters", {"budget": 96})], workload
    )
    assert full.found
    assert bounded.answer.usage.rows_kept == 96
    assert bounded.answer.evidence_kept < 1
    assert full.reading.perplexity < bounded.reading.perplexity * 1.2
    assert 0 < bounded.reading.fidelity.agreement <= 1

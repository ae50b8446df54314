"""What a demo says while it works and when it is done, whether or not anyone sits at a terminal."""

import shlex
import time

import pytest

from velox_cache.cli import demo
from velox_cache.cli.main import argument_parser, main
from velox_cache.evaluation.demo import Workload
from velox_cache.progress import progress_line, told_progress


def test_a_line_of_progress_says_what_how_far_and_how_long_still():
    assert progress_line("reading", 0.25, 10) == "reading: 25% of all, about 30 s left"
    assert progress_line("starting", 0, 4) == "starting: 0% of all, 4 s so far"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_told_also_while_nothing_is_reported(capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    told = ""
    with told_progress(10, every=0.001) as report:
        report("reading", 5)
        while told.count("reading: 50%") < 2:  # the suite's own timeout ends it where nothing is told
            time.sleep(0.001)
            told += capsys.readouterr().err
    assert ("\n" in told) is not terminal
    assert ("\r" in told) is terminal


def test_the_next_steps_can_be_typed():
    generate, compare, python = demo.next_steps("smollm2-135m", 512)
    for line in (generate, compare):
        program, command, *words = shlex.split(line, comments=True)
        assert program == "velox"
        argument_parser(command).parse_args([command, *words])
    compile(python, "next step", "exec")


def test_a_demo_on_a_slow_blas_says_what_to_do(letters_demo, capsys, monkeypatch):
    monkeypatch.setattr("velox_cache.slow_blas.slow_blas_advice", lambda: "take a faster one")
    assert main(["demo", "--model", "owner/tiny", "--budgets", "24,16", "--calibration-tokens", "200"]) == 0
    assert "take a faster one" in capsys.readouterr().out


def test_a_demo_ends_with_its_table_and_three_next_steps(tiny_model, letters_demo, capsys):
    assert main(["demo", "--model", "owner/tiny", "--budgets", "24,16", "--calibration-tokens", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(label in line for line in lines for label in ("full cache", "Fusion, ", "StreamingLLM, ")) == 5
    assert lines[-3:] == demo.next_steps("owner/tiny", 24)
    assert [file.suffix for file in (letters_demo / "calibrations").iterdir()] == [".npz"]


@pytest.fixture
def letters_demo(tiny_model, tmp_path, monkeypatch):
    """The demo on a tiny model; the folder in which it leaves its files."""
    from letters import Letters

    small = Workload(n_filler=60, n_answer=6, n_context=40, n_scored=10)
    monkeypatch.setattr("velox_cache.evaluation.demo.Workload", lambda: small)
    monkeypatch.setattr("velox_cache.cli.model_argument.load_model", lambda model: (tiny_model(), Letters()))
    monkeypatch.setenv("VELOX_CACHE_DIR", str(tmp_path))
    return tmp_path

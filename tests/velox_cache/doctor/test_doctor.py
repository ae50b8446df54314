"""The doctor's report names what matters, says what it could not check, and fails when something is wrong."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import model_of

from metal_src import metal_available
from velox_cache.cli import doctor as command
from velox_cache.cli import inspect_model
from velox_cache.doctor import report as doctor
from velox_cache.doctor.kernel_parity import Parity

RIGHT = Parity("qfilters_score", "1x1x1x1x1 float32", 0, 1)
WRONG = Parity("qfilters_score", "1x1x1x1x1 float32", 1, 1)


@pytest.fixture(scope="module")
def findings() -> list[doctor.Finding]:
    return doctor.doctor()


def test_the_report_names_versions_machine_kernels_and_speed(findings: list[doctor.Finding]) -> None:
    text = doctor.as_text(findings)
    for wanted in ("velox-kv", "mlx-lm", "chip", "Metal kernels", "GFLOP/s", "decode step over budget"):
        assert wanted in text


@pytest.mark.skipif(metal_available(), reason="says something else where there is an Apple GPU")
def test_without_metal_the_report_says_that_kernels_ran_only_emulated(findings: list[doctor.Finding]) -> None:
    assert {finding.value for finding in findings if finding.name == "parity"} == {
        "not run here; the tests run the kernels' source on the CPU"
    }


def parities(monkeypatch: pytest.MonkeyPatch, parity: Parity) -> None:
    def compare_kernels() -> Iterator[Parity]:
        yield parity

    monkeypatch.setattr("metal_src.metal_available", lambda: True)
    monkeypatch.setattr("velox_cache.doctor.kernel_parity.compare_kernels", compare_kernels)
    monkeypatch.setattr(doctor, "_speed", list)


@pytest.mark.parametrize(("parity", "status"), [(RIGHT, 0), (WRONG, 1)])
def test_a_kernel_that_differs_fails_the_command(
    parity: Parity, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parities(monkeypatch, parity)
    assert command.run(argparse.Namespace(json=False, model=None)) == status
    assert ("WRONG" in capsys.readouterr().out) == bool(status)


def test_a_kernel_that_does_not_compile_is_reported_with_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare_kernels() -> Iterator[Parity]:
        yield RIGHT
        raise RuntimeError("use of undeclared identifier 'TG'")

    parities(monkeypatch, RIGHT)
    monkeypatch.setattr("velox_cache.doctor.kernel_parity.compare_kernels", compare_kernels)
    assert command.run(argparse.Namespace(json=False, model=None)) == 1
    report = capsys.readouterr().out
    assert "undeclared identifier 'TG'" in report
    assert RIGHT.case in report


def test_the_json_report_holds_the_same_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parities(monkeypatch, WRONG)
    command.run(argparse.Namespace(json=True, model=None))
    assert json.loads(capsys.readouterr().out) == doctor.as_json(doctor.doctor())


def test_the_doctor_answers_when_chex_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "chex.py").write_text("raise AttributeError('module jax.core has no attribute Shape')")
    root = Path(__file__).parents[3]
    broken = os.pathsep.join([str(tmp_path), str(root)])
    ran = subprocess.run(
        [sys.executable, "-m", "velox_cache", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": broken},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = {finding["name"]: finding for finding in json.loads(ran.stdout)}
    assert found["broke off"]["value"] == "AttributeError: module jax.core has no attribute Shape"
    assert found["broke off"]["fault"]
    assert {"python", "chex", "jax", "chip"} <= found.keys()
    assert ran.returncode == 1


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gemma2", "mamba"])
def test_of_a_model_it_says_what_inspect_model_says(
    architecture: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlx_lm.load", lambda *_, **__: (model_of(architecture), None))
    monkeypatch.setattr("velox_cache.doctor.report.doctor", list)
    assert command.run(argparse.Namespace(json=True, model="owner/model")) == 0
    said = {finding["name"]: finding["value"] for finding in json.loads(capsys.readouterr().out)}
    inspect_model.run(argparse.Namespace(all=False, model="owner/model"))
    inspected = " ".join(capsys.readouterr().out.split())
    for about in said.keys() & {"layers", "queries", "renumbering", "masks"}:
        assert said[about] in inspected
    assert ("queries" in said) == (architecture != "mamba")


def test_an_mlx_lm_of_another_protocol_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("velox_cache.caches.mlx_lm_protocol.protocol_faults", lambda: ("its caches have meta_state",))
    monkeypatch.setattr(doctor, "_speed", list)
    found = {finding.name: finding for finding in doctor.doctor() if finding.topic == "mlx-lm"}
    assert found["cache protocol"].fault
    assert "meta_state" in found["cache protocol"].value
    assert "pip install 'mlx-lm" in found["what to do"].value

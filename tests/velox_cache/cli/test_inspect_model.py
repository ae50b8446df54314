"""`velox inspect-model`: one model, or the page of all architectures."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from velox_cache.architectures.page import page
from velox_cache.architectures.tiny import tiny_model as model_of
from velox_cache.architectures.verdict import verdict
from velox_cache.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"


def printed(model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (model, None))
    assert main(["inspect-model", "owner/model"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_queries_that_install_would_refuse_are_not_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(model_of("gemma2"), monkeypatch, capsys)  # it computes attention by hand
    assert "need queries='proxy' here" in shown
    assert "can be observed" not in shown


def test_a_model_without_rotary_embedding_is_told_that_rows_cannot_be_turned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "renumber=True is refused" in printed(model_of("gpt2"), monkeypatch, capsys)


def test_budgets_per_layer_that_serve_one_sequence_at_a_time_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "one sequence at a time" in printed(model_of("iquestloopcoder"), monkeypatch, capsys)
    assert "one sequence at a time" not in printed(model_of("llama"), monkeypatch, capsys)


def test_budgets_per_layer_that_install_refuses_are_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(model: nn.Module, method: str, **settings: object) -> None:
        if callable(settings["budget"]):
            raise ValueError("its masks are of one size")

    monkeypatch.setattr("velox_cache.architectures.verdict.install", refusing)
    shown = printed(model_of("llama"), monkeypatch, capsys)
    assert "budgets per layer are refused: its masks are of one size" in shown


def test_asking_leaves_the_model_as_it_was(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    assert verdict(model).no_queries is None
    assert "make_cache" not in vars(model)


@pytest.mark.parametrize("arguments", [[], ["owner/model", "--all"]], ids=["neither", "both"])
def test_one_model_or_all_of_them(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-model", *arguments]) == 2
    assert "either MODEL or --all" in capsys.readouterr().err


@pytest.mark.skipif(
    mx.metal.is_available(), reason="the page was written where models of Metal kernels cannot be tried"
)
def test_the_page_in_docs_is_what_the_command_writes() -> None:
    committed = PAGE.read_text()
    if f"with mlx-lm {version('mlx-lm')}:" not in committed:
        pytest.skip("the page in docs was written with another mlx_lm")
    assert committed == page()

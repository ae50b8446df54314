"""The velox command: quick help, one-line errors, and the real thing on a small model."""

import argparse
import io
import json
import re
import subprocess
import sys

import pytest

from velox_cache.cli import calibrate as calibrate_command
from velox_cache.cli import main as main_module
from velox_cache.cli.main import COMMANDS, main
from velox_cache.cli.method_arguments import add_method_arguments, install_method, method_settings
from velox_cache.cli.model_argument import model_folder, model_id
from velox_fn.registry import METHODS, method_factory

HEAVY = ("mlx", "mlx_lm", "numpy", "chex", "jax", "transformers")


def velox(*words: str, **options):
    command = [sys.executable, "-m", "velox_cache", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, **options)


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused in one line; the line."""

    def run(*words: str) -> str:
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"velox {words[0]}: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_imports_nothing_heavy(command):
    words = [command, "--help"] if command else ["--help"]
    script = (
        "import sys\nfrom velox_cache.cli.main import main\n"
        f"try: main({words})\nexcept SystemExit as end: assert not end.code\n"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("heavy: []\n")
    assert "example" in result.stdout


def test_a_bare_velox_shows_the_commands():
    result = velox()
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


def test_every_registered_method_is_listed_with_its_settings(capsys):
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    for name, factory in METHODS.items():
        assert f"\n{name}" in f"\n{listed}"
        assert f"budget={factory.__kwdefaults__['budget']}" in listed


def test_one_method_is_explained(capsys):
    assert main(["methods", "qfilters"]) == 0
    explained = capsys.readouterr().out
    assert "arXiv:2503.02812" in explained
    assert "calib_tokens=128" in explained


def test_arrays_are_not_listed_as_settings(capsys):
    main(["methods", "qfilters"])
    assert "filters=" not in capsys.readouterr().out.rsplit("settings:", 1)[1]


def test_an_unknown_method_is_refused_with_the_known_ones(refused):
    assert "qfilters" in refused("methods", "nonsense")


def test_a_folder_that_is_not_there_is_refused(refused):
    assert "no/such/folder" in refused("generate", "no/such/folder", "--prompt", "x")


def test_a_folder_without_a_model_is_refused(refused, tmp_path):
    assert "config.json" in refused("generate", str(tmp_path), "--prompt", "x")


def test_a_model_that_is_not_fetched_yet_says_how_to_fetch_it(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("VELOX_CACHE_DIR", str(tmp_path))
    assert "velox fetch-model smollm2-135m" in refused("generate", "smollm2-135m", "--prompt", "x")


def test_a_repository_that_the_hub_does_not_give_is_refused():
    import os

    result = velox("generate", "nobody/nothing", "--prompt", "x", env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "nobody/nothing" in result.stderr


def test_an_empty_prompt_is_refused(refused):
    assert "prompt" in refused("generate", "smollm2-135m", "--prompt", " ")


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("serve",)], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "qfliters"), "there is no method 'qfliters'"),
        (("--budget", "0"), "budget must be at least 1"),
        (("--budget", "64", "--recent", "64"), "must be smaller than budget"),
        (("--set", "bogus=1"), "no setting 'bogus'"),
        (("--method", "full", "--budget", "64"), "takes no settings"),
        (("--filters", "none.npz"), "none.npz"),
        (("--layer-shares", "pyramids"), "there is no such rule"),
        (("--method", "full", "--layer-shares", "pyramid"), "takes no settings"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_before_a_model_is_looked_for(command, options, message, refused):
    assert message in refused(command[0], "no/such/folder", *command[1:], *options)


def test_a_share_is_refused_where_the_prompt_is_not_known(refused):
    assert "number of rows" in refused("serve", "no/such/folder", "--budget", "0.25")


def test_generate_calibrates_once_and_takes_a_share_of_the_prompt(tmp_path, monkeypatch, capsys):
    from tiny_folder import write_tiny_folder

    monkeypatch.setenv("VELOX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("velox_cache.calibration.made_once.calibration_texts", lambda: ["some text to read, " * 20])
    (tmp_path / "model").mkdir()
    (tmp_path / "report.txt").write_text("A long report about nothing. " * 8)
    folder = str(write_tiny_folder(tmp_path / "model"))
    words = ["generate", folder, "--budget", "0.25", "--context", str(tmp_path / "report.txt"), "--prompt", "What?"]
    assert main([*words, "--max-tokens", "4"]) == 0
    assert "made in" in capsys.readouterr().err
    assert main([*words, "--max-tokens", "4"]) == 0
    told = capsys.readouterr().err
    assert "made in" not in told
    seen, rows = (int(word.replace(",", "")) for word in re.findall(r"([\d,]+) (?:tokens seen|rows kept)", told))
    assert rows == round((seen - 4) / 4) or rows == round((seen - 3) / 4)


def test_a_calibration_of_python_serves_the_command_line(tmp_path, monkeypatch, capsys):
    from mlx_lm import load
    from tiny_folder import write_tiny_folder

    from velox_cache import calibrate, save_calibration

    (tmp_path / "model").mkdir()
    folder = str(write_tiny_folder(tmp_path / "model"))
    save_calibration(calibrate(*load(folder), ["some text to read, " * 20], progress=False), tmp_path / "f.npz")
    words = ["generate", folder, "--prompt", "x", "--budget", "16", "--max-tokens", "2", "--filters"]
    assert main([*words, str(tmp_path / "f.npz")]) == 0
    assert main(["calibrate", folder, "--max-tokens", "100", "-o", str(tmp_path / "g.npz")]) == 0
    assert main([*words, str(tmp_path / "g.npz")]) == 0


def test_a_missing_output_folder_is_refused_before_the_model_loads(refused, tmp_path):
    assert "missing" in refused("calibrate", "smollm2-135m", "-o", str(tmp_path / "missing" / "calibration.npz"))


def test_a_file_that_is_no_artifact_is_refused(refused, tmp_path):
    other = tmp_path / "other.npz"
    other.write_bytes(b"not a zip")
    assert "other.npz" in refused("inspect", str(other))


def test_a_file_that_is_not_there_is_refused(refused, tmp_path):
    assert "none.npz" in refused("inspect", str(tmp_path / "none.npz"))


def test_traceback_shows_where_an_error_came_from(tmp_path):
    with pytest.raises(FileNotFoundError):
        main(["--traceback", "inspect", str(tmp_path / "none.npz")])


def test_an_interruption_is_one_line(monkeypatch, capsys):
    from velox_cache.cli import methods

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "run", interrupted)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "velox methods: interrupted\n"


def test_a_closed_pipe_is_no_error():
    script = f"{sys.executable} -m velox_cache methods | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "words", [("generate", "MODEL", "--prompt", "-"), ("calibrate", "MODEL", "-o", "f.npz", "--text", "-")]
)
def test_stdin_that_is_not_text_is_refused(words, refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors="surrogateescape"))
    assert "stdin is not UTF-8 text" in refused(*words)


@pytest.mark.parametrize("option", [("--temp", "-1"), ("--temp", "nan"), ("--top-p", "7"), ("--max-tokens", "0")])
def test_sampling_that_cannot_work_is_refused(option, refused):
    assert option[0] in refused("generate", "MODEL", "--prompt", "x", *option)


def settings_of(*words: str):
    parser = main_module.argparse.ArgumentParser()
    add_method_arguments(parser)
    return method_settings(parser.parse_args(words))


def test_settings_that_are_not_given_are_left_to_the_method():
    assert settings_of() == {}


def test_settings_become_keywords_of_install():
    given = settings_of("--budget", "64", "--n-sink", "2", "--set", "sign=-1", "--set", "granularity=token")
    assert given == {"budget": 64, "n_sink": 2, "sign": -1, "granularity": "token"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("True", True), ("False", False), ("None", None), ("true", True), ("false", False), ("null", None)],
)
def test_a_setting_is_read_in_the_form_that_velox_methods_shows(text, value):
    assert settings_of("--set", f"renumber={text}") == {"renumber": value}


def test_a_setting_given_twice_is_refused():
    with pytest.raises(ValueError, match="budget"):
        settings_of("--budget", "64", "--set", "budget=32")


@pytest.mark.parametrize(
    ("words", "budgets"),
    [
        (("--layer-shares", "pyramid", "--budget", "28"), [47, 9]),
        (("--layer-shares", "squeeze", "--budget", "28"), [28, 28]),  # two layers are too few to tell apart
    ],
)
def test_layers_share_the_budget(words, budgets, tiny_model, tokenizer):
    parser = argparse.ArgumentParser()
    add_method_arguments(parser)
    arguments = parser.parse_args(["--method", "l2norm", *words])
    assert install_method(tiny_model(), arguments, tokenizer=tokenizer).settings["budget"] == (
        budgets if len(set(budgets)) > 1 else budgets[0]
    )


def test_a_folder_is_known_by_its_last_part(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    assert model_id(str(tmp_path / "my-model")) == "my-model"


def test_a_repository_is_left_to_mlx_lm():
    assert model_folder("owner/name") is None


def test_calibrate_then_inspect(tiny_model, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate_command, "load_model", lambda model, shard: (tiny_model(), tokenizer))
    text, filters = tmp_path / "text.txt", tmp_path / "calibration.npz"
    text.write_text("All work and no play makes a dull text. " * 20)
    words = ["calibrate", "owner/tiny", "-o", str(filters), "--text", str(text), "--max-tokens", "300"]
    assert main(words) == 0
    assert main(["inspect", str(filters)]) == 0
    described = capsys.readouterr().out
    for fact in (
        "owner/tiny",
        "300 tokens",
        "text.txt",
        "2 of 2 layers",
        "2 heads of dimension 8",
        "post-rope",
        "layer 1 ",
    ):
        assert described.count(fact) == 2
    assert main([*words, "--no-learned"]) == 0
    assert "layer 1 " not in capsys.readouterr().out


def test_calibrate_searches_weights_and_says_what_came_of_it(tiny_model, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate_command, "load_model", lambda model, shard: (tiny_model(), tokenizer))
    text, filters = tmp_path / "text.txt", tmp_path / "calibration.npz"
    text.write_text("All work and no play makes a dull text. " * 150)
    words = ["calibrate", "owner/tiny", "-o", str(filters), "--text", str(text), "--max-tokens", "300"]
    assert main([*words, "--search-weights", "0.01"]) == 0
    assert "KL to the full cache" in capsys.readouterr().out
    before = json.loads((tmp_path / "calibration.npz.search.json").read_text())["steps"]
    assert main([*words, "--search-weights", "0.01"]) == 0
    assert json.loads((tmp_path / "calibration.npz.search.json").read_text())["steps"] >= before


def test_text_that_is_not_utf8_is_refused(tmp_path, monkeypatch, refused):
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xff\xfe\xff")
    assert "UTF-8" in refused("calibrate", "owner/tiny", "-o", str(tmp_path / "f.npz"), "--text", str(text))


@pytest.mark.real_model
def test_generate_streams_text_and_accounts_for_the_cache(smollm2_path):
    prompt = "Count from 1 to 50: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, "
    cache = ("--method", "streaming_llm", "--budget", "32", "--max-tokens", "24")
    result = velox("generate", str(smollm2_path), "--prompt", "-", "--no-chat", *cache, input=prompt)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().startswith("13, 14, 15")
    assert result.stderr.count("\n") == 1
    assert "32 rows kept" in result.stderr
    assert "tok/s" in result.stderr


@pytest.mark.real_model
@pytest.mark.parametrize("method", ["streaming_llm", "qfilters"])
def test_an_unknown_setting_is_refused_with_the_known_ones(smollm2_path, method, refused):
    line = refused("generate", str(smollm2_path), "--method", method, "--prompt", "x", "--set", "bogus=1")
    assert "bogus" in line
    assert all(name in line for name in ("budget", "n_sink"))


@pytest.mark.real_model
def test_filters_of_another_model_are_refused(smollm2_path, tmp_path, refused):
    import mlx.core as mx

    from velox_cache import Calibration, save_calibration

    save_calibration(Calibration([mx.ones((3, 64))] * 30, model_id="another"), tmp_path / "calibration.npz")
    words = ("generate", str(smollm2_path), "--prompt", "x", "--calibration", str(tmp_path / "calibration.npz"))
    assert "another" in refused(*words)


def test_every_method_can_be_named():
    assert all(method_factory(name) is factory for name, factory in METHODS.items())

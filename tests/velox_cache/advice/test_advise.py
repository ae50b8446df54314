"""Advice from a configuration alone: sizes that a run would leave, and a budget that fits."""

import json

import mlx.core as mx
import pytest
from conftest import PARTICULARS, SIZES

from velox_cache import install
from velox_cache.advice import memory
from velox_cache.advice.advise import advise, model_in_outline
from velox_cache.advice.memory import bytes_of, free_bytes
from velox_cache.cli.main import main

TOKEN = 2 * (2 * 2 * 8 * 2)  # layers x (keys and values x heads x dimension x bytes of float16)


@pytest.fixture
def folder(tmp_path):
    config = {"model_type": "llama", "torch_dtype": "float16", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_configuration_alone_says_what_a_token_takes(folder):
    advice = advise(model_in_outline(folder), memory=10**9, context=1000)
    assert advice.token_bytes == TOKEN
    assert advice.bounded_layers == advice.n_layers == 2


def test_no_budget_where_the_context_fits(folder):
    advice = advise(model_in_outline(folder), memory=10**9, context=1000)
    assert advice.budget is None
    assert advice.bounded_bytes(4096) == 4096 * TOKEN


def test_the_budget_fits_beside_weights_and_forward_pass_and_the_next_larger_does_not(folder):
    model = model_in_outline(folder)
    weights = advise(model, memory=10**9, context=10).weight_bytes
    given = int((weights + 1000 * TOKEN) / 0.9) + 1
    budget = advise(model, memory=given, context=32000).budget
    assert budget == 1000 // 64 * 64
    assert weights + budget * TOKEN <= 0.9 * given < weights + (budget + 64) * TOKEN


def test_bytes_are_those_that_installed_caches_come_to(folder):
    model = model_in_outline(folder)
    advice = advise(
        model, memory=int((advise(model, memory=10**9, context=1).weight_bytes + 200 * TOKEN) / 0.9), context=999
    )
    install(model, "l2norm", budget=advice.budget)
    caches = model.make_cache()
    model(mx.array([[token % 97 for token in range(400)]]), cache=caches)
    assert sum(cache.kept_bytes for cache in caches) == advice.bounded_bytes(400)


def test_too_little_memory_is_refused_with_the_parts(folder):
    with pytest.raises(ValueError, match=r"weights take .* 128 rows take"):
        advise(model_in_outline(folder), memory=1000, context=32000)


def test_a_model_of_which_nothing_can_be_bounded_is_refused(tiny_model):
    with pytest.raises(ValueError, match="sliding window"):
        advise(tiny_model("gemma3_text", num_hidden_layers=1), memory=10**9, context=10)


def test_the_command_says_what_is_not_known_and_what_to_run(folder, capsys):
    weights = advise(model_in_outline(folder), memory=10**9, context=1).weight_bytes
    given = int((weights + 300 * TOKEN) / 0.9)
    assert main(["advise", str(folder), "--memory", str(given), "--context", "32000"]) == 0
    said = capsys.readouterr().out
    assert "budget   256 rows" in said
    assert all(length in said for length in ("4,096", "32,768", "131,072"))
    assert f"velox compare {folder} --budgets 256 measures it" in said
    assert f"velox generate {folder} --budget 256" in said


def test_the_command_counts_the_layers_that_it_leaves_out(tmp_path, capsys):
    config = {"model_type": "gemma3_text", **SIZES, **PARTICULARS["gemma3_text"], "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["advise", str(tmp_path), "--memory", "1GB", "--context", "100"]) == 0
    said = capsys.readouterr().out
    assert "what the other 2 layers take" in said
    assert "--method full" in said


@pytest.mark.parametrize(
    ("text", "amount"), [("4GB", 4 * 10**9), ("1.5GiB", 3 * 2**29), ("800m", 8 * 10**8), ("4096", 4096)]
)
def test_amounts_are_read_as_they_are_written(text, amount):
    assert bytes_of(text) == amount


@pytest.mark.parametrize("text", ["much", "-4GB", "0GB", "4XB"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(ValueError, match="such as 4GB"):
        bytes_of(text)


def test_the_machine_says_how_much_is_free_or_that_it_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr(memory.mx, "default_device", lambda: memory.mx.cpu)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  10 kB\nMemAvailable:    2000 kB\n")
    monkeypatch.setattr(memory, "Path", lambda name: meminfo)
    assert free_bytes() == 2000 * 1024
    meminfo.write_text("")
    with pytest.raises(ValueError, match="--memory 4GB"):
        free_bytes()

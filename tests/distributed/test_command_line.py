"""The velox command under mlx.launch: the same words, one voice."""

import json
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from launching import free_ports, launched, run, running
from small_models import save_small_model, some_filters

from velox_cache import load_calibration, save_calibration

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a machine"
CACHE = ["--method", "l2norm", "--budget", 16]
GENERATE = [*CACHE, "--prompt", PROMPT, "--max-tokens", 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generated_alone(folder):
    alone = run(["-m", "velox_cache", "generate", folder, *GENERATE])
    assert alone.status == 0, alone.err
    return alone.out


@pytest.mark.parametrize("shard", ["heads", "layers"])
def test_ranks_that_hold_a_model_together_print_its_text_once(folder, generated_alone, shard):
    together = launched(2, "-m", "velox_cache", "generate", folder, *GENERATE, "--shard", shard)
    assert (together.status, together.out) == (0, generated_alone), together.err
    assert together.err.count("tokens seen") == 1
    assert "rank 0 of 2" in together.err


def test_ranks_calibrate_together_and_one_of_them_says_so(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes a dull text. " * 20)
    words = ["-m", "velox_cache", "calibrate", folder, "--text", text, "--sequence-length", 100, "-o"]
    alone, together = run([*words, tmp_path / "alone.npz"]), launched(2, *words, tmp_path / "together.npz")
    assert (alone.status, together.status) == (0, 0), alone.err + together.err
    told = [line for line in alone.out.splitlines() if "predicts " not in line]  # ranks do not measure that
    assert together.out.splitlines() == [line.replace("alone", "together") for line in told]
    one, two = (load_calibration(tmp_path / f"{name}.npz").filters for name in ("alone", "together"))
    for found, expected in zip(two, one, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_ranks_compare_together_and_report_what_one_process_reports(folder, tmp_path):
    calibration = tmp_path / "calibration.npz"
    save_calibration(some_filters(), calibration)
    options = ["--methods", "qfilters,l2norm", "--shares", "1/4", "--calibration", calibration, "--tasks", "none"]
    sizes = ["--length", 48, "--continuation", 8, "--kinds", "prose,code,dialogue", "--contexts", 1, "--traces", 0]
    places = ["--no-figures", "--rows", tmp_path / "rows", "--ceilings", "none", "--out"]
    words = ["-m", "velox_cache", "compare", folder, *options, *sizes, *places]
    alone, together = run([*words, tmp_path / "alone"]), launched(2, *words, tmp_path / "together")
    assert (alone.status, together.status) == (0, 0), alone.err + together.err
    assert together.out == alone.out.replace("alone", "together")
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("alone", "together"))
    assert len(two["rows"]) == 9
    assert two["rows"] == one["rows"]


def test_the_server_answers_with_what_one_process_generates(folder, generated_alone):
    port = free_ports(1)
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with running(2, "-m", "velox_cache", "serve", folder, *CACHE, "--port", port):
        assert answer(f"http://127.0.0.1:{port}/v1/completions", asked) == generated_alone.rstrip("\n")


def answer(address, asked, seconds=150):
    """The completion, from a server that may still be starting."""
    request = Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    until = time.monotonic() + seconds
    while True:
        try:
            with urlopen(request, timeout=seconds) as response:
                return json.load(response)["choices"][0]["text"]
        except URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def test_every_rank_tells_its_own_error_in_one_line(folder):
    refused = launched(2, "-m", "velox_cache", "generate", folder, "--prompt", "-")
    assert refused.status is not None
    assert refused.out == ""
    told = [line for line in refused.err.splitlines() if line.startswith("velox generate")]
    assert told
    assert all("stdin, which never ends under mlx.launch" in line for line in told)


def test_a_process_by_itself_makes_no_group(monkeypatch):
    import mlx.core as mx

    from velox_cache.distributed import collectives as distributed

    for name in ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mx.distributed, "init", lambda: pytest.fail("made a group"))
    assert distributed.world() is None

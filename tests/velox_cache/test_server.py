"""`velox serve`: mlx_lm's own server with evicting caches, over real HTTP on loopback."""

import argparse
import copy
import json
import socket
import string
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import faulty_server
import mlx.core as mx
import mlx_lm
import numpy as np
import openai
import pytest
from faulty_server import CALLS
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_folder import write_tiny_folder

import velox_cache as vc
import velox_fn
from velox_cache.calibration.texts import held_out_text
from velox_cache.models import default_cache_dir
from velox_cache.serve import EvictingModelProvider
from velox_cache.serving.prompt_prefixes import PromptPrefixes

BUDGET = 40
CACHE = ["--method", "qfilters", "--no-calibrate", "--budget", str(BUDGET), "--set", "calib_tokens=16"]
N_TOKENS = 12


class Server:
    """A running server and a client for it."""

    def __init__(self, port: int, log: Path) -> None:
        self.log = log
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)

    def complete(self, prompt: str, n_tokens: int = N_TOKENS, **options: Any) -> Any:
        """Greedy continuation."""
        return self.client.completions.create(
            model="default_model", prompt=prompt, max_tokens=n_tokens, temperature=0, **options
        )

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and body of the reply, whatever they are."""
        url = f"{self.client.base_url}{path}"
        asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=600) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def text(self, prompt: str, **options: Any) -> str:
        return self.complete(prompt, **options).choices[0].text


def running(model: Path, log: Path, *options: str) -> AbstractContextManager[Server]:
    return answering(log, lambda port: ["-m", "velox_cache", "serve", str(model), "--port", str(port), *options])


def faulty(model: Path, log: Path, *options: str) -> AbstractContextManager[Server]:
    """A server whose model fails at a quotation mark in a prompt."""
    return answering(log, lambda port: [faulty_server.__file__, str(model), str(port), *options])


@contextmanager
def answering(log: Path, command: Callable[[int], list[str]]) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as output:
        server = subprocess.Popen([sys.executable, *command(port)], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not answers(port):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Server(port, log)
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "log.txt", *CACHE) as started:
        yield started


@pytest.fixture(scope="module")
def sequential(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that serves one request at a time, as mlx_lm's does when kv_bits are given."""
    with running(
        folder, tmp_path_factory.mktemp("log") / "log.txt", *CACHE, "--server-options", "--kv-bits", "8"
    ) as started:
        yield started


@pytest.fixture(scope="module")
def computed_alone(folder: Path) -> Callable[..., str]:
    """The same continuation through mlx_lm.generate_step in this process."""
    model, tokenizer = mlx_lm.load(str(folder))
    vc.install(model, "qfilters", calibrate=False, budget=BUDGET, calib_tokens=16)
    return partial(continued, model, tokenizer)


def continued(model: Any, tokenizer: Any, prompt: str, n_tokens: int = N_TOKENS) -> str:
    steps = generate_step(mx.array(tokenizer.encode(prompt)), model, max_tokens=n_tokens)
    ids = [int(token) for token, _ in steps]
    detokenizer = tokenizer.detokenizer  # which forms broken characters otherwise than decoding them together does
    for token in ids[: ids.index(256)] if 256 in ids else ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def words(n_characters: int, seed: int) -> str:
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, n_characters)
    return "".join(map(chr, letters))


def test_answer_is_what_the_model_gives_in_this_process(server: Server, computed_alone: Callable[..., str]) -> None:
    prompt = words(100, 1)
    assert server.text(prompt) == computed_alone(prompt)


def test_eviction_changes_the_answer(folder: Path, computed_alone: Callable[..., str]) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    ids = tokenizer.encode(words(100, 1))
    unbounded = [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=N_TOKENS)]
    assert tokenizer.decode(unbounded) != computed_alone(words(100, 1))


def test_eight_at_once_get_what_each_gets_alone(server: Server, computed_alone: Callable[..., str]) -> None:
    prompts = [words(length, 10 + length) for length in (5, 170, 60, 33, 90, 8, 120, 45)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(server.text, prompts))
    assert together == [computed_alone(prompt) for prompt in prompts]


def test_sequential_server_answers_alike(sequential: Server, computed_alone: Callable[..., str]) -> None:
    prompts = [words(length, 20 + length) for length in (70, 9, 130)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(sequential.text, prompts)) == [computed_alone(prompt) for prompt in prompts]


def test_server_says_at_the_start_what_kv_bits_do(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log.txt", *CACHE, "--server-options", "--kv-bits", "8") as started:
        assert (
            "--kv-bits 8 among mlx_lm's options: with it mlx_lm serves one request at a time" in started.log.read_text()
        )


def test_layers_with_budgets_of_their_own_are_served_together(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    budgets = vc.pyramid_budgets(model, BUDGET)
    vc.install(model, "l2norm", budget=budgets)
    prompts = [words(length, 40 + length) for length in (60, 9, 100)]
    options = ["--method", "l2norm", "--budget", str(BUDGET), "--layer-shares", "pyramid"]
    with running(folder, tmp_path / "log.txt", *options) as started:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(started.text, prompts)) == [continued(model, tokenizer, prompt) for prompt in prompts]
        log = started.log.read_text()
    assert f"budget={min(budgets)} to {max(budgets)}" in log
    assert "failed" not in log


def test_quantised_rows_are_served(tmp_path: Path) -> None:
    wide = write_tiny_folder(tmp_path, head_dim=32)
    options = ["--method", "l2norm", "--budget", str(BUDGET), "--key-bits", "8", "--value-bits", "4"]
    with running(wide, tmp_path / "log.txt", *options, "--kv-group-size", "32") as started:
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(started.complete, [words(length, 30 + length) for length in (60, 9, 100)]))
        # How near ties fall depends on how a prompt is cut, since a block attends to itself in full precision.
        assert all(reply.usage.completion_tokens > 0 for reply in replies)
        log = started.log.read_text()
    assert "key_bits=8, value_bits=4, group_size=32" in log
    assert "one request at a time" not in log
    assert "failed" not in log


@pytest.mark.parametrize("kind", ["server", "sequential"])
def test_streamed_text_is_the_whole_text(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(kind)
    prompt = words(80, 3)
    streamed = "".join(part.choices[0].text for part in server.complete(prompt, stream=True) if part.choices)
    assert streamed == server.text(prompt)


@pytest.mark.parametrize("kind", ["server", "sequential"])
def test_same_prompt_again_reuses_its_cache_and_answers_alike(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(kind)
    prompt = words(90, 4 if kind == "server" else 5)
    first, second = server.complete(prompt), server.complete(prompt)
    assert second.choices[0].text == first.choices[0].text
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (
        89 if kind == "server" else 0
    )  # one at a time, only what was answered is stored: too long to trim


@pytest.mark.parametrize("kind", ["server", "sequential"])
def test_shorter_prompt_after_eviction_is_recomputed_rightly(
    kind: str, request: pytest.FixtureRequest, computed_alone: Callable[..., str]
) -> None:
    server = request.getfixturevalue(kind)
    prompt = words(120, 6)
    server.text(prompt)
    assert server.text(prompt[:100]) == computed_alone(prompt[:100])


@pytest.mark.parametrize("kind", ["server", "sequential"])
def test_shorter_prompt_before_eviction_takes_back_tokens_rightly(
    kind: str, request: pytest.FixtureRequest, computed_alone: Callable[..., str]
) -> None:
    server = request.getfixturevalue(kind)
    prompt = words(25, 7)
    server.text(prompt)
    reply = server.complete(prompt[:20])
    assert reply.usage.prompt_tokens_details.cached_tokens == 19
    assert reply.choices[0].text == computed_alone(prompt[:20])


@pytest.mark.parametrize("kind", ["server", "sequential"])
def test_prompt_that_is_wholly_cached_is_answered(
    kind: str, request: pytest.FixtureRequest, computed_alone: Callable[..., str]
) -> None:
    server = request.getfixturevalue(kind)
    prompt = words(90, 8)
    server.text(prompt)
    assert server.text(prompt[:-1]) == computed_alone(prompt[:-1])  # its cache, to the last token, is known


@pytest.mark.parametrize("kind", ["server", "sequential"])
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"prompt": ""}, "no tokens"),
        ({"prompt": ["a", "b"]}, "one string"),
        ({"prompt": 7}, "one string"),
        ({"prompt": "a", "stop": [5]}, "stop=[5]"),
    ],
)
def test_prompt_that_cannot_be_served_is_refused_and_others_are_served(
    kind: str,
    asked: dict[str, Any],
    reason: str,
    request: pytest.FixtureRequest,
    computed_alone: Callable[..., str],
) -> None:
    server = request.getfixturevalue(kind)
    for stream in (False, True):
        status, reply = server.post("completions", {**asked, "stream": stream})
        assert status == 400
        assert reason in reply
    prompt = words(30, 9)
    assert server.text(prompt) == computed_alone(prompt)


def test_reply_that_cannot_be_written_ends_with_the_reason(server: Server) -> None:
    asked = {"prompt": words(30, 11), "max_tokens": 2, "stream": True, "stream_options": {}}
    _, reply = server.post("completions", asked)  # mlx_lm looks for stream_options["include_usage"]
    assert "KeyError: 'include_usage'" in reply
    assert server.text("after")


def test_messages_that_cannot_be_used_are_refused(server: Server) -> None:
    status, reply = server.post("chat/completions", {"messages": [{"role": "user", "content": [{"type": "no"}]}]})
    assert status == 400
    assert "messages cannot be used" in reply


@pytest.mark.parametrize("kind", ["batched", pytest.param("alone", marks=pytest.mark.slow)])
def test_request_that_fails_fails_alone(
    folder: Path, tmp_path: Path, kind: str, computed_alone: Callable[..., str]
) -> None:
    prompts = [words(length, 300 + length) for length in (90, 20, 33, 60)]
    with faulty(folder, tmp_path / "log.txt", kind) as server, ThreadPoolExecutor(8) as pool:
        stream = server.complete(words(50, 299), 300, stream=True)
        begun = [next(stream).choices[0].text]
        good = [pool.submit(server.text, prompt) for prompt in prompts]
        failing = [pool.submit(server.post, "completions", {"prompt": f'{prompt}""x'}) for prompt in prompts]
        assert [one.result() for one in good] == [computed_alone(prompt) for prompt in prompts]
        for one in failing:
            status, reply = one.result()
            assert status == 500
            assert "RuntimeError: this token cannot be computed" in reply
        streamed = "".join(begun + [part.choices[0].text for part in stream if part.choices])
        assert streamed == computed_alone(words(50, 299), 300)
        with pytest.raises(openai.APIError, match="cannot be computed"):
            list(server.complete('a""b', stream=True))
        assert server.text("after") == computed_alone("after")


@pytest.mark.parametrize("kind", ["batched", pytest.param("alone", marks=pytest.mark.slow)])
def test_whatever_a_cache_raises_fails_no_other_request(
    folder: Path, tmp_path: Path, kind: str, computed_alone: Callable[..., str]
) -> None:
    always = ["update_and_fetch", "make_mask", "nbytes", *(["merge", "extract"] if kind == "batched" else [])]
    log = tmp_path / "log.txt"
    with faulty(folder, log, kind) as server, ThreadPoolExecutor(4) as pool:
        for letter, call in zip(string.ascii_lowercase, CALLS, strict=False):
            good = [words(length, 400 + ord(letter) + length) for length in (60, 25, 90)]
            failing = pool.submit(server.post, "completions", {"prompt": f'{words(50, ord(letter))}"{letter}x'})
            assert list(pool.map(server.text, good)) == [computed_alone(prompt) for prompt in good]
            status, reply = failing.result()
            assert status == 200 or (status == 500 and f"{call} cannot be done" in reply)
            assert status == 500 or call not in ("update_and_fetch", "make_mask")
    for call in always:  # the others as requests happen to meet
        assert f"{call} fails" in log.read_text()


@pytest.mark.parametrize(
    ("kind", "method"),  # whose key-SVD has a warm-up, and which has none
    [
        ("batched", "qfilters"),
        ("alone", "l2norm"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("batched", "l2norm"), ("alone", "qfilters"))),
    ],
)
def test_cache_that_cannot_be_taken_back_so_far_is_recomputed(
    folder: Path, tmp_path: Path, kind: str, method: str
) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    vc.install(model, method, budget=BUDGET, rollback=4, **({"calib_tokens": 16} if method == "qfilters" else {}))
    prompt = words(90, 310)
    with faulty(folder, tmp_path / "log.txt", kind, f"method={method}", "rollback=4") as server:
        server.text(prompt)
        for length in (89, 45, 3):
            assert server.text(prompt[:length]) == continued(model, tokenizer, prompt[:length])


def test_two_conversations_do_not_see_each_other(server: Server) -> None:
    def talk(secret: str) -> list[str]:
        messages: list[Any] = [{"role": "system", "content": "You are terse."}]
        said = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{secret} {turn}"})
            reply = server.client.chat.completions.create(
                model="default_model", messages=messages, max_tokens=8, temperature=0
            )
            said.append(reply.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": said[-1]})
        return said

    secrets = [words(30, 100 + i) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(talk, secrets))
    assert together == [talk(secret) for secret in secrets]


@pytest.mark.parametrize("opened", ["", "<think>"], ids=["answer", "reasoning"])
def test_conversation_whose_template_strips_reasoning_reuses_its_cache_from_the_second_turn_on(
    tmp_path: Path, opened: str
) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'].split('</think>')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] " + opened + "{% endif %}"
    )
    model = write_tiny_folder(tmp_path, template, ["<think>", "</think>"])
    messages: list[Any] = []
    known = 0
    with running(model, tmp_path / "log.txt", *CACHE) as server:
        for turn in range(3):
            messages.append({"role": "user", "content": words(60, 500 + turn)})
            used = server.client.chat.completions.create(
                model="default_model", messages=messages, max_tokens=8, temperature=0
            ).usage
            assert used is not None
            assert used.prompt_tokens_details is not None
            assert used.prompt_tokens_details.cached_tokens == known
            known = used.prompt_tokens - 1  # all but <think>, which the template takes out, or a token to go on from
            messages.append({"role": "assistant", "content": f"{words(50, 600)}</think>{words(9, 700 + turn)}"})


def write_adapter(folder: Path, base: Path, seed: int) -> Path:
    """A random LoRA adapter of the model in `base`."""
    lora = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    model, _ = mlx_lm.load(str(base))
    mx.random.seed(seed)
    linear_to_lora_layers(model, 2, lora)
    parts = {name: array for name, array in tree_flatten(model.parameters()) if "lora" in name}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora})
    )
    random = {name: mx.random.normal(array.shape) / array.shape[0] ** 0.5 for name, array in parts.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), random)
    return folder


def test_two_adapters_behind_one_server_answer_each_for_itself(folder: Path, tmp_path: Path) -> None:
    prompt = words(25, 800)
    adapters = [None, *(str(write_adapter(tmp_path / f"adapter_{seed}", folder, seed)) for seed in (1, 2))]
    expected = []
    for adapter in adapters:
        model, tokenizer = mlx_lm.load(str(folder), adapter_path=adapter)
        vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
        expected.append(continued(model, tokenizer, prompt))
    assert len(set(expected)) == 3
    with running(folder, tmp_path / "log.txt", *CACHE) as server:
        for cached in (0, 24):
            for adapter, text in zip(adapters, expected, strict=True):
                named = {} if adapter is None else {"adapters": adapter}
                reply = server.complete(prompt, extra_body=named)
                assert reply.choices[0].text == text
                assert reply.usage.prompt_tokens_details.cached_tokens == cached


def test_log_says_what_was_installed(server: Server) -> None:
    assert f"qfilters (budget={BUDGET}" in server.log.read_text()


@pytest.mark.parametrize(
    ("options", "asked"),
    [  # the last two are served one at a time
        ([], {}),
        pytest.param(["--kv-bits", "8"], {}, marks=pytest.mark.slow),
        ([], {"seed": 3}),
    ],
    ids=["batched", "kv_bits", "seed"],
)
def test_byte_limit_of_the_prompt_cache_holds(
    folder: Path, tmp_path: Path, options: list[str], asked: dict[str, Any]
) -> None:
    limit = ["--server-options", "--prompt-cache-bytes", "0.06M", *options]
    with running(folder, tmp_path / "log.txt", *CACHE, *limit) as server:
        for seed in range(12):
            server.text(words(80, 200 + seed), **asked)
        stored = [line for line in server.log.read_text().splitlines() if "Prompt Cache:" in line][-1]
        assert "0.00 GB" in stored
        n_sequences = int(stored.split("Prompt Cache: ")[1].split(" ")[0])
        assert 0 < n_sequences <= 7  # 5 of 12 KB each when the last request came, and the 2 of its own


def test_settings_that_cannot_work_end_the_server_with_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "velox_cache", "serve", str(folder), "--port", "0", "--budget", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "velox serve: n_sink" in ran.stderr


def test_draft_model_is_refused_with_the_way_to_do_it(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "velox_cache",
        "serve",
        str(folder),
        *CACHE,
        "--server-options",
        "--draft-model",
        str(folder),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "rollback" in ran.stderr


def test_wholly_known_prompt_leaves_a_token_to_run() -> None:
    model = mlx_lm  # any key will do
    for evicted in (True, False):
        cache = vc.EvictingKVCache(
            vc.KVCacheConfig(method="qfilters", qfilters_budget=8, qfilters_calib_tokens=2).eviction()
        )
        shorter = vc.EvictingKVCache(cache.method)
        block = mx.random.normal((1, 1, 20 if evicted else 6, 4))
        cache.update_and_fetch(block, block)
        shorter.update_and_fetch(block[:, :, :-3], block[:, :, :-3])
        tokens = list(range(block.shape[2]))
        store = PromptPrefixes()
        store.insert_cache(model, tokens[:-3], [shorter])
        store.insert_cache(model, tokens, [cache])
        found, rest = store.fetch_nearest_cache(model, tokens)
        assert found is not None
        assert rest == tokens[-3:] if evicted else tokens[-1:]
        assert found[0].offset == len(tokens) - len(rest)


def test_wholly_known_prompt_without_a_known_prefix_starts_anew() -> None:
    cache = vc.EvictingKVCache(vc.KVCacheConfig(qfilters_budget=8, qfilters_calib_tokens=2).eviction())
    cache.update_and_fetch(mx.ones((1, 1, 20, 4)), mx.ones((1, 1, 20, 4)))
    store = PromptPrefixes()
    store.insert_cache("model", list(range(20)), [cache])
    assert store.fetch_nearest_cache("model", list(range(20))) == (None, list(range(20)))


def test_prefix_stays_stored_where_the_longer_cache_cannot_be_taken_back_to_it() -> None:
    tokens = list(range(50))
    for budget, interval, snapshots, kept in ((64, 1, 0, 1), (16, 8, 0, 2), (16, 8, 3, 1)):
        method = velox_fn.streaming_llm(budget=budget, interval=interval)
        store = PromptPrefixes()
        cache = vc.EvictingKVCache(method, snapshots=snapshots)
        for stop in (8, 16, 24, 32, 40, 48, 50):
            block = mx.ones((1, 1, 2 if stop == 50 else 8, 4))
            cache.update_and_fetch(block, block)
            if stop in (40, 50):
                store.insert_cache("model", tokens[:stop], [copy.deepcopy(cache)])
        assert len(store) == kept
        found, rest = store.fetch_nearest_cache("model", [*tokens[:40], 60, 61])
        assert found is not None
        assert (found[0].offset, rest) == (40, [60, 61])


@pytest.mark.slow
def test_at_intervals_a_prompt_from_before_the_last_reply_reuses_its_evicted_cache(
    folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    vc.install(model, "l2norm", budget=BUDGET, interval=16)
    prompt = words(146, 70)
    with running(
        folder, tmp_path / "log.txt", "--method", "l2norm", "--budget", str(BUDGET), "--set", "interval=16"
    ) as server:
        assert server.text(prompt) == continued(model, tokenizer, prompt)
        # With its reply the prompt has passed the boundary at 144: only its snapshot goes back to 140.
        for known in (140, 146, 145):
            asked = prompt[:known] + words(9, 70 + known)
            reply = server.complete(asked)
            assert reply.choices[0].text == continued(model, tokenizer, asked)
            assert reply.usage.prompt_tokens_details.cached_tokens == known


@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_eight_smollm2_requests_at_once_get_what_each_gets_alone(tmp_path: Path) -> None:
    model = default_cache_dir() / "smollm2-135m-float32"
    words_of = held_out_text().split()
    prompts = [" ".join(words_of[start : start + 10 + 25 * start]) for start in range(8)]
    with running(model, tmp_path / "log.txt", "--budget", "96") as server, ThreadPoolExecutor(8) as pool:
        together = list(pool.map(server.text, prompts))
    with running(model, tmp_path / "log.txt", "--budget", "96") as server:
        assert together == [server.text(prompt) for prompt in prompts]


def test_install_is_given_the_tokenizer_where_it_takes_one(folder: Path) -> None:
    given: list[tuple[Any, Any]] = []
    no = dict.fromkeys(["adapter_path", "draft_model", "trust_remote_code", "chat_template", "pipeline", "kv_bits"])
    asked = argparse.Namespace(model=str(folder), use_default_chat_template=False, **no)

    def with_one(model: Any, tokenizer: Any) -> None:
        given.append((model, tokenizer))

    of_layers = EvictingModelProvider(asked, partial(vc.install, method="l2norm", budget=[40, 16]))
    of_layers.load_default()
    assert of_layers.is_batchable
    for install in (with_one, lambda model: given.append((model, None))):
        provider = EvictingModelProvider(asked, install)
        provider.load_default()
        assert given[-1] == (provider.model, provider.tokenizer if install is with_one else None)

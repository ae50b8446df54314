"""`velox serve --pin-system`: what a chat's system message takes in its prompt stays in its cache."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from tiny_folder import write_tiny_folder

import velox_cache as vc
from velox_cache.serving.failures import RequestFailedError, refusing
from velox_cache.serving.generation import ServingGenerator
from velox_cache.serving.prompt_prefixes import PromptPrefixes
from velox_cache.serving.system_prompt import system_end
from velox_fn import kept_positions

SYSTEM = {"role": "system", "content": "Be brief."}
BUDGET = 48


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, tokenizer = mlx_lm.load(str(write_tiny_folder(Path(tmp_path_factory.mktemp("tiny")))))[:2]
    vc.install(model, "l2norm", budget=BUDGET, recent=4, interval=8)
    return model, tokenizer


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))


def prompt_of(loaded: Any, store: PromptPrefixes, messages: list[dict[str, str]]) -> list[int]:
    """The prompt, after the server has looked at it."""
    model, tokenizer = loaded
    prompt = rendered(tokenizer, messages)
    provider = SimpleNamespace(model=model, cli_args=SimpleNamespace(chat_template_args={}))
    generator: Any = SimpleNamespace(model_provider=provider, _prefixes=store)
    request: Any = SimpleNamespace(request_type="chat", messages=messages, tools=None)
    arguments: Any = SimpleNamespace(chat_template_kwargs=None)
    ServingGenerator._begin_pinned(generator, tokenizer, request, arguments, prompt)
    return prompt


@pytest.mark.parametrize("said", ["Hello.", "", "0 is a number", "\n"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_the_system_message_ends_where_the_next_turn_begins(loaded: Any, said: str, role: str) -> None:
    tokenizer = loaded[1]
    messages = [SYSTEM, {"role": role, "content": said}]
    end = system_end(tokenizer, messages, rendered(tokenizer, messages), {})
    # One token per byte: the message is whole, and nothing of what is said is there.
    beginning = tokenizer.decode(rendered(tokenizer, messages)[:end])
    assert "[system] Be brief.\n[user] ".startswith(beginning)
    assert beginning.startswith("[system] Be brief.\n[")


def test_without_a_system_message_nothing_is_pinned(loaded: Any) -> None:
    store = PromptPrefixes()
    prompt = prompt_of(loaded, store, [{"role": "user", "content": "Hello."}])
    assert store.fetch_nearest_cache("model", prompt) == (None, prompt)


def test_the_system_message_stays_in_cold_and_in_reused_caches(loaded: Any) -> None:
    model, store, reused = loaded[0], PromptPrefixes(), 0
    messages = [SYSTEM, {"role": "user", "content": "a long tale " * 12}]
    for _ in range(3):
        prompt = prompt_of(loaded, store, messages)
        end = system_end(loaded[1], messages, prompt, {})
        cache, rest = store.fetch_nearest_cache("model", prompt)
        assert cache is not None
        assert len(prompt) - len(rest) == reused
        model(mx.array([rest]), cache=cache)
        for layer in cache:
            assert layer.offset == len(prompt) > 2 * BUDGET
            assert (np.array(kept_positions(layer.record))[..., :end] == np.arange(end)).all()
        store.insert_cache("model", prompt, cache)
        reused = len(prompt)
        messages += [{"role": "assistant", "content": "and so on"}, {"role": "user", "content": "Go on. " * 9}]


def test_a_cache_is_not_reused_by_a_prompt_that_pins_otherwise(loaded: Any) -> None:
    model, store = loaded[0], PromptPrefixes()
    prompt = prompt_of(loaded, store, [SYSTEM, {"role": "user", "content": "a long tale"}])
    cache, rest = store.fetch_nearest_cache("model", prompt)
    assert cache is not None
    model(mx.array([rest]), cache=cache)
    store.insert_cache("model", prompt, cache)
    longer = [*prompt, 1, 2]
    assert store.fetch_nearest_cache("model", longer) == (None, longer)  # nothing is pinned: a completion, say
    store.insert_cache("model", prompt, loaded[0].make_cache())
    assert len(store) == 2


def test_a_system_message_that_fills_the_budget_is_refused(loaded: Any) -> None:
    messages = [{**SYSTEM, "content": "Be brief. " * 9}, {"role": "user", "content": ""}]
    words = r"the system message .* raise budget by at least"
    with pytest.raises(RequestFailedError, match=words) as refused, refusing("the system message"):
        prompt_of(loaded, PromptPrefixes(), messages)
    assert refused.value.status == 400

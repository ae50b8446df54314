"""Batched generation through mlx_lm's own batch generator."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from calibrated import needed_calibration
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

import velox_cache as vc
from velox_cache.calibration.texts import held_out_text
from velox_cache.models import default_cache_dir
from velox_fn import METHODS, kept_positions

LENGTHS = (5, 130, 67, 90)
BUDGET = 48
VOCABULARY = 499


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    """No token twice: its key would have the norm of another, and rounding would decide which of the two stays."""
    return [int(token) for token in np.random.default_rng([seed, n_tokens]).permutation(VOCABULARY)[:n_tokens]]


PROMPTS = [prompt(length) for length in LENGTHS]


def generated(
    model: nn.Module, prompts: list[list[int]], max_tokens: list[int], **options: Any
) -> tuple[list[list[int]], list[list[Any]], list[list[mx.array]]]:
    """Greedy tokens, the caches at the end, and the logprobs of each step, per prompt."""
    generator = BatchGenerator(model, **options)
    uids = generator.insert(prompts, max_tokens)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    logprobs: dict[int, list[mx.array]] = {uid: [] for uid in uids}
    caches: dict[int, list[Any]] = {}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
            logprobs[response.uid].append(response.logprobs)
            if response.prompt_cache is not None:
                caches[response.uid] = response.prompt_cache
    generator.close()
    return tuple([found[uid] for uid in uids] for found in (tokens, caches, logprobs))  # type: ignore[return-value]


def furthest(batched: list[list[mx.array]], alone: list[list[mx.array]]) -> float:
    return max(
        mx.abs(one - other).max().item()
        for rows in zip(batched, alone, strict=True)
        for one, other in zip(*rows, strict=True)
    )


@pytest.mark.parametrize("method", METHODS)
def test_ragged_batch_generates_what_each_prompt_does_alone(method: str, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, method, budget=BUDGET, calibration=needed_calibration(method))
    max_tokens = [20, 10, 25, 15]
    tokens, caches, logprobs = generated(model, PROMPTS, max_tokens)
    alone = [generated(model, [one], [count]) for one, count in zip(PROMPTS, max_tokens, strict=True)]
    assert tokens == [result[0][0] for result in alone]
    assert furthest(logprobs, [result[2][0] for result in alone]) < 1e-4
    for row, result in zip(caches, alone, strict=True):
        for batched, single in zip(row, result[1][0], strict=True):
            assert batched.offset == single.offset
            assert mx.array_equal(kept_positions(batched.record), kept_positions(single.record))


@pytest.mark.parametrize("prefill_step_size", [16, 33])
def test_ragged_prefill_in_steps_generates_what_each_prompt_does_alone(
    prefill_step_size: int, tiny_model: Callable[..., nn.Module]
) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    tokens, _, _ = generated(model, PROMPTS, [12] * 4, prefill_step_size=prefill_step_size)
    alone = [generated(model, [one], [12], prefill_step_size=prefill_step_size)[0][0] for one in PROMPTS]
    assert tokens == alone


def test_rows_that_join_and_leave_change_nothing_for_the_others(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    arrivals = {0: (prompt(70), 40), 3: (prompt(9), 5), 7: (prompt(120), 30), 11: (prompt(3), 50), 30: (prompt(55), 9)}
    generator = BatchGenerator(model, prefill_step_size=32)
    tokens: dict[int, list[int]] = {}
    waiting = dict(arrivals)
    for step in range(400):
        if step in waiting:
            ids, count = waiting.pop(step)
            (uid,) = generator.insert([ids], [count])
            tokens[uid] = []
        responses = generator.next()[1]
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    alone = [generated(model, [ids], [count], prefill_step_size=32)[0][0] for ids, count in arrivals.values()]
    assert list(tokens.values()) == alone


def test_removed_request_leaves_the_others_alone(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    generator = BatchGenerator(model)
    uids = generator.insert([prompt(80), prompt(20), prompt(100)], [30, 30, 30])
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    for step in range(60):
        for response in generator.next()[1]:
            tokens[response.uid].append(response.token)
        if step == 10:
            generator.remove([uids[1]])
    generator.close()
    alone = [generated(model, [prompt(length)], [30])[0][0] for length in (80, 100)]
    assert [tokens[uids[0]], tokens[uids[2]]] == alone


def test_rows_of_a_batch_stay_within_budget_and_are_evicting_caches(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    _, caches, _ = generated(model, PROMPTS, [30] * 4)
    for row, length in zip(caches, LENGTHS, strict=True):
        assert all(type(cache) is vc.EvictingKVCache for cache in row)
        assert [cache.size() for cache in row] == [min(BUDGET, length + 30)] * len(row)
        assert [cache.offset for cache in row] == [length + 30] * len(row)


def test_given_prompt_caches_are_continued(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    histories = [prompt(20, seed=1), prompt(140, seed=2)]
    caches = [make_prompt_cache(model) for _ in histories]
    for history, cache in zip(histories, caches, strict=True):
        model(mx.array([history]), cache=cache)
    copies = [[type(part).from_state(part.state) for part in cache] for cache in caches]
    generator = BatchGenerator(model)
    uids = generator.insert([prompt(6), prompt(9)], [12, 12], caches=caches)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    for uid, cache, ids in zip(uids, copies, (prompt(6), prompt(9)), strict=True):
        alone = generate_step(mx.array(ids), model, prompt_cache=cache, max_tokens=12)
        assert [token for token, _ in alone] == tokens[uid]


def test_two_generations_in_a_row_are_alike(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    first, second = (generated(model, PROMPTS, [10] * 4)[0] for _ in range(2))
    assert first == second


def test_short_prompt_after_a_long_one_equals_a_fresh_start(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    generated(model, [prompt(200)], [20])
    after = generated(model, [prompt(10)], [20])[0]
    fresh = tiny_model(vocab_size=VOCABULARY)
    vc.install(fresh, "qfilters", budget=BUDGET, calib_tokens=16)
    assert after == generated(fresh, [prompt(10)], [20])[0]


def test_caches_of_other_settings_do_not_share_a_batch(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    one = make_prompt_cache(model)
    vc.install(model, "qfilters", budget=BUDGET + 1)
    other = make_prompt_cache(model)
    with pytest.raises(ValueError, match="one set of settings"):
        type(one[0]).merge([one[0], other[0]])


def test_plain_and_evicting_caches_do_not_share_a_batch(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    vc.install(model, "qfilters", budget=BUDGET, calib_tokens=16)
    with pytest.raises((ValueError, AttributeError, TypeError)):
        make_prompt_cache(model)[0].merge([make_prompt_cache(model)[0], KVCache()])


@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_smollm2_batch_of_30_400_and_900_tokens_equals_each_alone() -> None:
    model, tokenizer = mlx_lm.load(str(default_cache_dir() / "smollm2-135m-float32"))
    ids = tokenizer.encode(held_out_text())
    prompts = [ids[:30], ids[:400], ids[:900]]
    differences = {}
    for name in ("plain", "evicting"):
        if name == "evicting":
            vc.install(model, "qfilters", budget=256)
        tokens, _, logprobs = generated(model, prompts, [40] * 3)
        alone = [generated(model, [one], [40]) for one in prompts]
        assert tokens == [result[0][0] for result in alone]
        differences[name] = furthest(logprobs, [result[2][0] for result in alone])
    print(f"\nlargest difference of a log-probability, batched from alone: {differences}")
    assert differences["evicting"] < 10 * differences["plain"]

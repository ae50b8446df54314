"""Models whose caches evict at intervals: what they say is a function of the tokens, however these come in calls."""

import copy
import json
import pickle
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from calibrated import needed_calibration
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import velox_cache as vc
from velox_cache.caches.digest import digest
from velox_fn import METHODS, at_intervals, kept_positions, static_eviction

INTERVAL, BUDGET = 16, 40
TOKENS = mx.array(np.random.default_rng(0).integers(0, 97, 150))
every_method = pytest.mark.parametrize("method", METHODS)
Tiny = Callable[..., nn.Module]


def installed(tiny_model: Tiny, method: str, **options: Any) -> nn.Module:
    model = tiny_model()
    options = {"budget": BUDGET, "interval": INTERVAL, "filters": needed_calibration(method), **options}
    vc.install(model, method, **options)
    return model


def read(model: nn.Module, calls: list[int], caches: list[Any] | None = None, start: int = 0) -> tuple[mx.array, Any]:
    caches = make_prompt_cache(model) if caches is None else caches
    edges = pairwise(accumulate(calls, initial=start))
    logits = [model(TOKENS[None, begin:end], cache=caches) for begin, end in edges]
    return mx.concatenate(logits, axis=1), caches


def positions(caches: list[Any]) -> list[np.ndarray]:
    return [np.array(kept_positions(cache.record)) for cache in caches]


def assert_same_rows(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(positions(one), positions(other), strict=True):
        np.testing.assert_array_equal(a, b)


@every_method
def test_logits_do_not_depend_on_the_cuts(method: str, tiny_model: Tiny) -> None:
    model = installed(tiny_model, method)
    expected, caches = read(model, [1] * 150)
    assert caches[0].offset == 150
    assert caches[0].size() == caches[0].tokens_kept == BUDGET + 150 % INTERVAL
    for calls in ([150], [7] * 21 + [3], [64, 1, 1, 1, 83]):
        logits, others = read(model, calls)
        assert mx.abs(logits - expected).max().item() < 1e-4
        assert_same_rows(others, caches)


@every_method
def test_ragged_batches_generate_what_each_prompt_does_alone(method: str, tiny_model: Tiny) -> None:
    model = installed(tiny_model, method)
    prompts = [[int(t) for t in np.random.default_rng(n).permutation(97)[:n]] for n in (5, 90, 47)]

    def generated(prompts: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
        generator = BatchGenerator(model, prefill_step_size=33)
        uids = generator.insert(prompts, [20] * len(prompts))
        tokens, caches = {uid: [] for uid in uids}, {}
        while responses := generator.next_generated():
            for response in responses:
                tokens[response.uid].append(response.token)
                if response.prompt_cache is not None:
                    caches[response.uid] = response.prompt_cache
        generator.close()
        return [tokens[uid] for uid in uids], [caches[uid] for uid in uids]

    together, rows = generated(prompts)
    for prompt, tokens, caches in zip(prompts, together, rows, strict=True):
        [alone], [own] = generated([prompt])
        assert tokens == alone
        assert [cache.offset for cache in caches] == [cache.offset for cache in own]
        assert_same_rows(caches, own)


@every_method
@pytest.mark.parametrize("seen", [75, 80])
def test_saved_and_pickled_caches_go_on(method: str, seen: int, tmp_path: Path, tiny_model: Tiny) -> None:
    model = installed(tiny_model, method)
    _, caches = read(model, [seen])
    vc.save_prompt_cache(tmp_path / "cache.safetensors", caches)
    copies = (vc.load_prompt_cache(tmp_path / "cache.safetensors"), pickle.loads(pickle.dumps(caches)))
    expected, _ = read(model, [40], copy.deepcopy(caches), seen)
    for others in copies:
        logits, others = read(model, [40], others, seen)
        assert mx.array_equal(logits, expected)


@every_method
def test_trim_is_exact_since_the_boundary_and_beyond_it_with_a_snapshot(method: str, tiny_model: Tiny) -> None:
    model = installed(tiny_model, method, snapshots=1)
    for seen, back in ((90, 10), (90, 12), (86, 16), (80, 5)):
        _, caches = read(model, [seen])
        assert trim_prompt_cache(caches, back) == back
        _, alone = read(model, [seen - back])
        assert [cache.offset for cache in caches] == [seen - back] * len(caches)
        logits, caches = read(model, [30], caches, seen - back)
        again, alone = read(model, [30], alone, seen - back)
        assert mx.abs(logits - again).max().item() < 1e-4
        assert_same_rows(caches, alone)


def test_trim_beyond_what_is_kept_is_refused(tiny_model: Tiny) -> None:
    model = installed(tiny_model, "l2norm")
    _, caches = read(model, [90])
    assert trim_prompt_cache(caches, 1) == 0  # who asks whether any number can be taken back is told no
    with pytest.raises(ValueError, match="install with more snapshots"):
        caches[0].trim(12)
    assert [cache.offset for cache in caches] == [90] * len(caches)
    assert [cache.trim(10) for cache in caches] == [10] * len(caches)
    logits, _ = read(model, [20], caches, 80)
    expected, _ = read(model, [80, 20])
    assert mx.abs(logits - expected[:, 80:]).max().item() < 1e-4


@every_method
def test_within_budget_any_number_can_be_taken_back(method: str, tiny_model: Tiny) -> None:
    model = installed(tiny_model, method)
    for seen, back in ((14, 9), (30, 14), (30, 17), (37, 21), (32, 32), (32, 16)):
        _, caches = read(model, [seen])
        trimmable = caches[0].is_trimmable()
        assert trimmable == (caches[0].method.static or seen <= INTERVAL)
        assert trim_prompt_cache(caches, back) == back * trimmable
        if trimmable:
            logits, caches = read(model, [60], caches, seen - back)
            expected, others = read(model, [seen - back + 60])
            assert mx.abs(logits - expected[:, seen - back :]).max().item() < 1e-4
            assert_same_rows(caches, others)


@every_method
def test_speculative_decoding_says_what_plain_decoding_does(method: str, tiny_model: Tiny) -> None:
    model, draft = installed(tiny_model, method, snapshots=1), tiny_model()
    prompt = TOKENS[:60]
    plain = [token for token, _ in generate_step(prompt, model, max_tokens=60)]
    drafted = [
        token for token, *_ in speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=60)
    ]
    assert [int(token) for token in drafted] == [int(token) for token in plain]


def test_memory_is_flat_at_budget_and_interval(tiny_model: Tiny) -> None:
    model = installed(tiny_model, "l2norm")
    caches, held = make_prompt_cache(model), set()
    for t in range(140):
        mx.eval(model(TOKENS[None, t : t + 1], cache=caches))
        if t >= BUDGET + INTERVAL:
            held.add(caches[0].nbytes)
    row = 2 * caches[0].record.store.keys.shape[1] * 16 * 4
    assert max(held) <= (BUDGET + INTERVAL) * (row + 2 * 8) + 64


@pytest.mark.slow
def test_4000_tokens_at_budget_512_neither_retrace_nor_grow(tiny_model: Tiny) -> None:
    budget, interval, n_tokens, scored = 512, 128, 4000, []

    def score(keys: mx.array, values: mx.array, positions: mx.array, params: Any) -> mx.array:
        scored.append(keys.shape[2])  # by Python, so when it is traced
        return (keys * keys).sum(-1).astype(mx.float32)

    model = tiny_model()
    vc.install(model, at_intervals(static_eviction("by_norm", score, budget=budget), interval))
    caches, held, used = make_prompt_cache(model), [], []
    for _ in generate_step(TOKENS, model, max_tokens=n_tokens - TOKENS.size, prompt_cache=caches):
        held.append(sum(cache.nbytes for cache in caches))
        used.append(mx.get_active_memory())
    assert caches[0].offset == n_tokens
    assert scored == [interval]
    rows = caches[0].record.store
    row = rows.keys.shape[1] * (rows.keys.shape[3] + rows.values.shape[3]) * rows.keys.itemsize
    most = (budget + interval) * row + budget * rows.keys.shape[1] * 8 + 64
    assert max(held) <= len(caches) * most
    assert max(used[-2 * interval :]) < 1.02 * max(used[:2000])  # a few hundred bytes are those of steps under way


def test_a_cache_made_by_hand_refuses_a_block_across_a_boundary(tiny_model: Tiny) -> None:
    model = installed(tiny_model, "l2norm")
    caches = make_prompt_cache(model)
    vc.uninstall(model)
    with pytest.raises(ValueError, match=r"parts of \(16, 4\) tokens"):
        model(TOKENS[None, :20], cache=caches)
    assert caches[0].empty()


def test_uninstall_gives_the_class_back(tiny_model: Tiny) -> None:
    model = tiny_model()
    whole = type(model)
    for interval in (INTERVAL, 1):
        vc.install(model, "l2norm", budget=BUDGET, interval=interval)
        assert isinstance(model, whole)
        assert (type(model) is whole) == (interval == 1)
    vc.uninstall(model)
    assert type(model) is whole


def test_embeddings_are_taken_apart_with_their_tokens(tiny_model: Tiny) -> None:
    model = installed(tiny_model, "l2norm")
    expected, _ = read(model, [60])
    embeddings = model.model.embed_tokens(TOKENS[None, :60])
    logits = model(TOKENS[None, :60], cache=make_prompt_cache(model), input_embeddings=embeddings)
    assert mx.array_equal(logits, expected)


def test_a_copy_of_the_model_evicts_alike(tiny_model: Tiny) -> None:
    model = installed(tiny_model, "l2norm")
    expected, caches = read(model, [90])
    logits, others = read(copy.deepcopy(model), [50, 40])
    assert mx.abs(logits - expected).max().item() < 1e-4
    assert_same_rows(others, caches)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kept", [39]),
        ("kept", [41]),
        ("since", [9]),
        ("since", [1]),
        ("seen", [91]),
        ("settled", 39),
        ("ragged", True),
        ("interval", 8),
    ],
)
def test_a_state_whose_counts_contradict_its_rows_is_refused(name: str, value: Any, tiny_model: Tiny) -> None:
    _, caches = read(installed(tiny_model, "l2norm"), [90])
    packed = list(caches[0].state)
    header = json.loads(packed[0])
    header["record"]["store"]["span"][name] = value
    packed[0] = json.dumps(header)
    packed[-1] = digest(packed[0], packed[1:-1])
    with pytest.raises(ValueError, match="contradicts itself"):
        vc.EvictingKVCache.from_state(packed)

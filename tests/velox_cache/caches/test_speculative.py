"""Speculative decoding over evicting caches: drafts are taken back to the last row, evicted rows included."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from calibrated import needed_calibration
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
from velox_cache.models import default_cache_dir
from velox_fn import METHODS, kept_positions, kv
from velox_fn.registry import BUILT_IN

PROMPT = [(13 * i) % 97 for i in range(60)]
# Those that take tokens back without a calibration, and without a warm-up.
STATIC = [name for name, method in BUILT_IN.items() if method.rollback and method.make().static and name != "qfilters"]


class Replayed(vc.EvictingKVCache):
    """An evicting cache that also feeds a second one, without any rollback, with accepted tokens only.

    What arrives is held back until the trim that ends each round says how much of it was accepted.
    """

    def __init__(self, cache: vc.EvictingKVCache) -> None:
        super().__init__(cache.method)
        settings = {**cache.method.settings, "rollback": 0}
        self.accepted = vc.EvictingKVCache(BUILT_IN[cache.method.name].make(**settings, **cache.method.params))
        self.pending: list[tuple[mx.array, mx.array]] = []
        self.rounds_compared_after_eviction = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.pending.append((keys, values))
        return super().update_and_fetch(keys, values)

    def trim(self, n: int) -> int:
        taken = super().trim(n)
        left = taken
        while left:
            keys, values = self.pending.pop()
            kept = max(0, keys.shape[2] - left)
            left -= keys.shape[2] - kept
            if kept:
                self.pending.append((keys[:, :, :kept], values[:, :, :kept]))
        for keys, values in self.pending:
            self.accepted.update_and_fetch(keys, values)
        self.pending.clear()
        mx.eval(self.accepted.state)
        self.compare()
        return taken

    def compare(self) -> None:
        assert self.offset == self.accepted.offset
        assert mx.array_equal(kept_positions(self.record), kept_positions(self.accepted.record))
        for one, other in zip(kv(self.record), kv(self.accepted.record), strict=True):
            assert mx.array_equal(one, other)
        self.rounds_compared_after_eviction += self.offset > self.method.settings["budget"]


def replayed(model: nn.Module) -> list[Any]:
    return [Replayed(cache) for cache in make_prompt_cache(model)]


def drafted(model: nn.Module, draft: nn.Module, n_tokens: int, prompt: list[int], **options: Any) -> Iterator[int]:
    steps = speculative_generate_step(mx.array(prompt), model, draft, max_tokens=n_tokens, **options)
    return (int(token) for token, _, _ in steps)


@pytest.mark.parametrize("method", STATIC)
@pytest.mark.parametrize("num_draft_tokens", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_round_leaves_the_state_of_the_accepted_tokens(
    method: str, num_draft_tokens: int, tiny_model: Callable[..., nn.Module]
) -> None:
    model, draft = tiny_model(), tiny_model(seed=1)
    for one in (model, draft):
        vc.install(one, method, budget=32, rollback=num_draft_tokens, calibration=needed_calibration(method))
    caches, draft_caches = replayed(model), replayed(draft)
    tokens = list(
        drafted(
            model,
            draft,
            120,
            PROMPT,
            num_draft_tokens=num_draft_tokens,
            prompt_cache=caches + draft_caches,
            prefill_step_size=25,
        )
    )
    assert len(tokens) == 120
    assert all(cache.rounds_compared_after_eviction > 20 for cache in caches)


@pytest.mark.slow
def test_calibrated_filters_with_rollback_hold_too_and_over_300_tokens(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    filters = [mx.random.normal((2, 8), key=mx.random.key(layer)) for layer in range(2)]
    calibration = vc.Calibration(filters, model_id="tiny", n_samples=1, dataset="random")
    vc.install(model, "qfilters", budget=32, rollback=4, calibration=calibration)
    rough = tiny_model(seed=1)
    vc.install(rough, "qfilters", budget=32, rollback=4, calibration=calibration)
    caches = replayed(model)
    list(drafted(model, rough, 400, PROMPT, num_draft_tokens=4, prompt_cache=caches + make_prompt_cache(rough)))
    assert all(cache.rounds_compared_after_eviction > 70 for cache in caches)
    assert all(cache.offset - 32 > 300 for cache in caches)


def test_good_draft_is_accepted_and_gives_the_undrafted_text(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=200, rollback=3)  # nothing leaves: a verify block sees what single steps see
    steps = list(speculative_generate_step(mx.array(PROMPT), model, model, num_draft_tokens=3, max_tokens=60))
    plain = [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=60)]
    assert [int(token) for token, _, _ in steps] == plain
    assert sum(from_draft for _, _, from_draft in steps) >= 40


def test_without_rollback_mlx_lm_refuses_speculative_decoding(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "qfilters", budget=32)
    with pytest.raises(ValueError, match="trimmable"):
        next(drafted(model, model, 5, PROMPT))


def test_more_drafts_than_rollback_raises_and_says_what_to_install(tiny_model: Callable[..., nn.Module]) -> None:
    model, draft = tiny_model(), tiny_model(seed=1)
    for one in (model, draft):
        vc.install(one, "l2norm", budget=32, rollback=1)
    with pytest.raises(ValueError, match="rollback=4"):
        list(drafted(model, draft, 40, PROMPT, num_draft_tokens=4))


@pytest.mark.parametrize("method", [name for name in METHODS if not BUILT_IN[name].make().static])
def test_methods_whose_scores_accumulate_refuse_rollback_with_the_reason(
    method: str, tiny_model: Callable[..., nn.Module]
) -> None:
    with pytest.raises(ValueError, match=r"rollback=2.*(accumulate|chang)"):
        vc.install(tiny_model(), method, budget=40, rollback=2)


@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_smollm2_as_its_own_draft_over_300_tokens_past_the_first_eviction() -> None:
    model, tokenizer = mlx_lm.load(str(default_cache_dir() / "smollm2-135m-float32"))
    vc.install(model, "l2norm", budget=64, rollback=3)
    prompt = tokenizer.encode("Once upon a time, in a village by the sea, there lived an old man who")
    caches = replayed(model)
    tokens = list(
        drafted(model, model, 370, prompt, num_draft_tokens=3, prompt_cache=caches + make_prompt_cache(model))
    )
    assert all(cache.offset > 64 + 300 for cache in caches)
    assert all(cache.rounds_compared_after_eviction > 70 for cache in caches)
    undrafted = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=370)]
    agreed = next((i for i, (a, b) in enumerate(zip(tokens, undrafted, strict=True)) if a != b), len(tokens))
    print(f"\nfirst {agreed} of {len(tokens)} tokens are those of undrafted decoding")
    assert agreed > 0

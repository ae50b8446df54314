"""A model's generation under each cache: tokens a second, memory, and the cache's share of a token's time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from velox_cache.bench.arms import N_SINK
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.calibration.texts import filler_text
from velox_cache.installation.installing import install, uninstall
from velox_cache.installation.layer_arguments import calibration_for
from velox_cache.introspection.query_tap import observe_queries
from velox_cache.known_methods import known_methods, method_named

PROMPT, ANSWER = 1024, 128  # tokens
_IN_TURN = ("KVCache", "RotatingKVCache", "qfilters")


@dataclass(frozen=True)
class Run:
    """One cache under one model. Rates are medians of the rounds, each with its lowest and highest."""

    label: str
    budget: int | None
    decode_tokens_per_second: tuple[float, float, float]  # median, lowest, highest
    prefill_tokens_per_second: float
    peak_bytes: int  # most that MLX held beside the weights
    most_rows: int  # physical rows of a layer at the end
    cache_bytes: int
    cache_share: float  # of a decoded token's time: a step of each layer's cache, timed alone, over the token


@dataclass(frozen=True)
class _Sample:
    decode: float
    prefill: float
    peak: int
    caches: list[Any]


def end_to_end(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    *,
    budgets: tuple[int, ...],
    rounds: int,
    calibration: Any | None = None,
    methods: Sequence[str] | None = None,
    advance: Callable[[str], object] = print,
) -> Iterator[Run]:
    """Every cache at every budget. `advance` is told each run's label.

    mlx_lm's caches and Q-Filters take turns, `rounds` times; the others run once, the slowest last. With `methods`,
    only mlx_lm's caches and these run, and all take turns.

    The model ends up with its own caches.
    """
    prompt = bench_prompt(tokenizer)
    for budget in (None, *budgets):
        makers = cache_makers(model, budget, calibration, methods)
        samples: dict[str, list[_Sample]] = {label: [] for label in makers}
        taking_turns = [label for label in makers if methods is not None or label in _IN_TURN]
        once = [label for label in makers if label not in taking_turns]
        for label in taking_turns * rounds + once:
            advance(f"{label}, {budget}")
            samples[label].append(_generate(model, tokenizer, prompt, makers[label]))
            if len(samples[label]) == (rounds if label in taking_turns else 1):
                yield _run(label, budget, samples[label])
    uninstall(model)


def bench_prompt(tokenizer: TokenizerWrapper) -> list[int]:
    """The prompt of every run."""
    tokens = list(tokenizer.encode(filler_text()))
    return (tokens * (PROMPT // len(tokens) + 1))[:PROMPT]


def cache_makers(
    model: nn.Module, budget: int | None, calibration: Any | None, methods: Sequence[str] | None = None
) -> Mapping[str, Callable[[], list[Any]]]:
    """By label, what makes a model's caches: mlx_lm's own, and at a budget those of `methods` (None: all).

    Without a calibration, methods that need one are left out. The caches of a method stay installed.
    """
    if budget is None:
        return {"KVCache": lambda: make_prompt_cache(model)}
    n_layers = len(make_prompt_cache(model))
    rotating = {"RotatingKVCache": lambda: [RotatingKVCache(max_size=budget, keep=N_SINK) for _ in range(n_layers)]}
    wanted = {name: method for name, method in known_methods().items() if methods is None or name in methods}
    usable = [name for name, method in wanted.items() if calibration is not None or not method.needs_calibration]
    slowest_last = sorted(usable, key=("expected_attention", "curdkv").__contains__)
    return {**rotating, **{name: _installed(model, name, budget, calibration) for name in slowest_last}}


def _installed(model: nn.Module, name: str, budget: int, calibration: Any | None) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        uninstall(model)
        install(
            model,
            name,
            budget=budget,
            calibration=calibration_for(method_named(name), calibration),
            calibrate=False,
        )
        caches: list[Any] = make_prompt_cache(model)
        return caches

    return make


def _generate(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: list[int], make: Callable[[], list[Any]]
) -> _Sample:
    uninstall(model)
    caches = make()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    times = [time.perf_counter()]
    with observe_queries(model):
        for _ in stream_generate(model, tokenizer, prompt, max_tokens=ANSWER, prompt_cache=caches):
            times.append(time.perf_counter())
    peak = mx.get_peak_memory() - before
    decode = (len(times) - 2) / (times[-1] - times[1])
    return _Sample(decode, len(prompt) / (times[1] - times[0]), peak, caches)


def _run(label: str, budget: int | None, samples: list[_Sample]) -> Run:
    rates = [sample.decode for sample in samples]
    caches = samples[-1].caches
    share = sum(_step_seconds(cache) for cache in caches) * median(rates)
    return Run(
        label,
        budget,
        (median(rates), min(rates), max(rates)),
        median(sample.prefill for sample in samples),
        max(sample.peak for sample in samples),
        max(_held(cache)[0].shape[2] for cache in caches),
        sum(cache.nbytes for cache in caches),
        share,
    )


def _held(cache: Any) -> tuple[mx.array, mx.array]:
    if isinstance(cache, EvictingKVCache):
        record: Any = cache.record
        return record.store.keys, record.store.values
    return cache.keys, cache.values


def _step_seconds(cache: Any, steps: int = 12) -> float:
    """A token into this cache, timed alone; queries stand in where the method waits for them."""
    keys, values = _held(cache)
    token = [mx.random.normal((*rows.shape[:2], 1, rows.shape[3])).astype(rows.dtype) for rows in (keys, values)]
    mx.eval(token)
    del keys, values
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        seen_keys, seen_values = cache.update_and_fetch(*token)
        if isinstance(cache, EvictingKVCache):
            mx.eval(cache.observe_queries(token[0], token[0], seen_keys, seen_values, 1.0))
        mx.eval(seen_keys, seen_values)
        seconds.append(time.perf_counter() - start)
        del seen_keys, seen_values
    return median(seconds)

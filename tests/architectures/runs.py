"""Runs of an architecture's model, with the caches that it makes or with evicting ones, and what came of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import BATCH_WRONGLY, CANNOT_BATCH, RUNNING, model_of

import velox_cache as vc
from velox_cache.introspection.plan import plan_layers
from velox_cache.introspection.query_tap import flat_caches

PROMPT = [int(token) for token in np.random.default_rng(0).permutation(64)[:28]]  # longer than the sliding windows
SPLITS = {"at once": (28,), "in chunks": (17, 1, 10), "token by token": (1,) * 28}
PROMPTS = (PROMPT[:7], PROMPT, PROMPT[3:22])  # of a ragged batch
BOUNDED = tuple(name for name in RUNNING if any(entry.bounded for entry in plan_layers(model_of(name))))
PROMPTS_OF_ONE_LENGTH = (PROMPT[:19], PROMPT[3:22], PROMPT[9:])  # of a batch without padding
BATCHED = tuple(name for name in BOUNDED if name not in CANNOT_BATCH and name not in BATCH_WRONGLY)
BATCHED_WITHOUT_PADDING = tuple(name for name in BOUNDED if name in BATCH_WRONGLY)


@contextmanager
def installed(architecture: str, method: str = "l2norm", **settings: Any) -> Iterator[nn.Module]:
    """The architecture's shared model with evicting caches, for the length of a `with`."""
    model = model_of(architecture)
    vc.install(model, method, **settings)
    try:
        yield model
    finally:
        vc.uninstall(model)


def run(model: nn.Module, lengths: Sequence[int], caches: list[Any] | None = None) -> tuple[np.ndarray, list[Any]]:
    """Logits [S, vocabulary] of PROMPT, fed in calls of these lengths, and the caches afterwards."""
    caches = make_prompt_cache(model) if caches is None else caches
    stops = np.cumsum(lengths).tolist()
    calls = [PROMPT[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]
    logits = []
    for call in calls:
        logits.append(model(mx.array([call]), cache=caches)[0])
        mx.eval(logits[-1], [cache.state for cache in caches])
    return np.array(mx.concatenate(logits).astype(mx.float32)), caches


def evicting(caches: Sequence[Any]) -> list[vc.EvictingKVCache]:
    return [cache for cache in flat_caches(caches) if isinstance(cache, vc.EvictingKVCache)]


def furthest(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays of logits; tokens that a model rules out are -inf in both."""
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(one - other)).max())


def rows_of(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def batched(model: nn.Module, prompts: Sequence[list[int]], n_tokens: int = 4) -> list[np.ndarray]:
    """Log-probabilities [n_tokens, vocabulary] that mlx_lm's batch generator gives each prompt, in one ragged batch."""
    generator = BatchGenerator(model, prefill_step_size=16)
    uids = generator.insert([list(prompt) for prompt in prompts], [n_tokens] * len(prompts))
    found: dict[int, list[np.ndarray]] = {uid: [] for uid in uids}
    try:
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(np.array(response.logprobs.astype(mx.float32)))
    finally:
        generator.close()
    return [np.stack(found[uid]) for uid in uids]

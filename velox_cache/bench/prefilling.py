"""A prompt read under a model in turns with each cache: at intervals its call is taken apart."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from velox_cache.bench.rounds import Comparison, compare
from velox_cache.installation.installing import uninstall


def prefill_in_turns(
    model: nn.Module, tokens: Sequence[int], installs: Mapping[int, Callable[[], object]], *, rounds: int
) -> Comparison:
    """`tokens` read in one call of the model, beside the caches of interval 1.

    installs: by interval, 1 among them, what installs such caches in the model. The model's own caches have a turn too.
    It ends up with them.
    """
    uninstall(model)
    fresh = {"full cache": make_prompt_cache(model)}
    for interval in sorted(installs):  # the last install has calls taken apart, those of any of these caches
        uninstall(model)
        installs[interval]()
        fresh[f"interval {interval}"] = make_prompt_cache(model)
    arms = {label: partial(_read, model, mx.array(list(tokens))[None], caches) for label, caches in fresh.items()}
    arms = {"interval 1": arms["interval 1"], **arms}  # the reference is the first
    found = compare("prefill under the model", f"{len(tokens)} tokens", arms, rounds=rounds)
    uninstall(model)
    return found


def _read(model: nn.Module, tokens: mx.array, empty: list[Any]) -> None:
    caches = copy.deepcopy(empty)
    model(tokens, cache=caches)
    mx.eval([cache.state for cache in caches])  # as mlx_lm's prefill, which makes no logits of a prompt

"""Search for the weights of a fusion, by what counts: the next-token distribution of the full cache.

A candidate is a weight for each term, head and layer, and the share of the budget that recent rows get. Prompts are
prefilled once; each candidate evicts from them anew, and a continuation, half of it new and half repeated from early in
the prompt, is read token by token, all prompts side by side. Its loss is the mean KL divergence from the full cache's
distributions. A step changes the best candidate so far, and is kept when the loss falls: first the weights of the whole
model one by one, then a (1+1) evolution of single layers and heads. Steps depend on the seed and the step's number
alone, so an interrupted search goes on as if it had not been.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.default_recent import RECENT_SHARE
from velox_cache.calibration.fusion_choice import FusionChoice
from velox_cache.calibration.fusion_weights import without_weights
from velox_cache.calibration.values_read import default_terms
from velox_cache.file_checks import check_folder_of
from velox_cache.harness.arms import Arm, cache_maker
from velox_cache.harness.fidelity import token_fidelity
from velox_cache.harness.shared_prefill import SharedPrefill, shared_prefill
from velox_cache.harness.side_by_side import side_by_side
from velox_cache.harness.texts import passages, text_digest
from velox_cache.learning.fusion_candidate import Candidate, changed, equal_weights, moved
from velox_cache.learning.search_progress import begun, write_progress
from velox_fn.engine import checks
from velox_fn.methods.fusion import COMBINE, TERMS, term_names
from velox_fn.registry import method_named

_LEAST_BUDGET = 16  # rows

Advance = Callable[[int, float, float], object]
"""Called with the steps done, the loss of equal weights, and the best so far."""


@dataclass(frozen=True)
class SearchSizes:
    """How much text a candidate is tried on. The budgets are shares of the context, which prompts take in turn.

    Raises ValueError on sizes that leave nothing to search or to judge by.
    """

    n_context: int = 512
    n_scored: int = 64
    n_prompts: int = 4
    n_held_out: int = 4
    budgets: tuple[float, ...] = (0.25, 0.4)

    def __post_init__(self) -> None:
        for name, least in (("n_context", 32), ("n_scored", 2), ("n_prompts", 1), ("n_held_out", 1)):
            object.__setattr__(self, name, checks.whole_number(name, getattr(self, name), least))
        shares = self.budgets if isinstance(self.budgets, tuple) else ()
        if not shares or not all(isinstance(share, float) and 0 < share < 1 for share in shares):
            raise ValueError(f"budgets must be a tuple of shares of the context between 0 and 1, got {self.budgets!r}")
        if round(min(shares) * self.n_context) < _LEAST_BUDGET:
            raise ValueError(
                f"budgets={self.budgets} of n_context={self.n_context} tokens leave fewer than {_LEAST_BUDGET} rows: "
                "nothing to choose among beside first and recent rows; take more of either"
            )
        if self.n_scored > self.n_context:
            raise ValueError(f"n_scored={self.n_scored} must not exceed n_context={self.n_context}: half is repeated")


@dataclass(frozen=True)
class SearchOutcome:
    """What came of a search. Losses: mean KL to the full cache, nats per token."""

    calibration: Calibration  # with the weights that were found, if they were accepted
    accepted: bool  # they also win on text that the search did not see
    steps: int
    equal_loss: float
    best_loss: float
    equal_held_out: float
    best_held_out: float

    def __str__(self) -> str:
        verdict = "kept" if self.accepted else "not kept: equal weights stay"
        return (
            f"{self.steps} steps; KL to the full cache {self.equal_loss:.4f} -> {self.best_loss:.4f} on the searched "
            f"text, {self.equal_held_out:.4f} -> {self.best_held_out:.4f} on other text; {verdict}"
        )


@dataclass(frozen=True, eq=False)
class _Prompt:
    prefill: SharedPrefill
    continuation: list[int]
    reference: mx.array  # float32 [n, V], log-probabilities under the full cache
    budget: int


def search_weights(
    model: nn.Module,
    tokenizer: Tokenizer,
    calibration: Calibration,
    texts: Sequence[str],
    *,
    seconds: float,
    terms: str | tuple[str, ...] | None = None,
    combine: str = COMBINE,
    seed: int = 0,
    sizes: SearchSizes = SearchSizes(),
    state_file: str | os.PathLike[str] | None = None,
    most_steps: int | None = None,
    advance: Advance = lambda steps, equal, best: None,
) -> SearchOutcome:
    """Search weights of the fusion of `terms`, for about `seconds`, or `most_steps` in all.

    terms: by default those that `install` takes on this model.
    texts: the first part serves the search. The last one decides whether what it found is kept: only when its loss
    there is lower than that of equal weights.
    state_file: the search is written there step by step, and one that is there is gone on with.

    Holds the keys, values and queries of all prompts.

    Raises ValueError when the texts are too short, when the state file is of another search, and what `install` raises.
    """
    names = term_names(terms or default_terms(method_named("fusion"), {}, model).get("terms", TERMS))
    seed = checks.whole_number("seed", seed, 0, 2**64 - 1)
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}; a step takes about a second on a small model")
    plain = without_weights(calibration)
    choice = FusionChoice(names, combine, RECENT_SHARE)
    tokens = [token for text in texts for token in tokenizer.encode(text)]
    searched, held_out = _split(tokens, sizes)

    def loss(candidate: Candidate, prompts: Sequence[_Prompt]) -> float:
        return _loss(model, candidate.in_calibration(plain, choice), choice, prompts)

    prompts = [_prompt(model, passage, i, seed, sizes) for i, passage in enumerate(searched)]
    equal = equal_weights(plain, len(names))
    # Not the calibration's numbers: made anew from the same text, as the command does, they may differ in last bits.
    identity = {
        "version": version("velox-kv"),
        "model": plain.model_id,
        "tokens": plain.n_tokens,
        "texts": text_digest("\n".join(texts)),
        "terms": list(names),
        "combine": combine,
        "seed": seed,
        "sizes": json.loads(json.dumps(vars(sizes))),
    }
    if state_file is not None:
        check_folder_of(state_file)
    state = begun(state_file, identity, equal)
    if state.equal_loss is None:
        state.equal_loss = state.best_loss = loss(equal, prompts)
    started, tried = time.monotonic(), [state.best]  # what lost once loses again
    while time.monotonic() - started < seconds and (most_steps is None or state.steps < most_steps):
        candidate = moved(state.best, state.steps) or changed(state.best, np.random.default_rng([seed, state.steps]))
        if candidate not in tried:
            tried.append(candidate)
            if (found := loss(candidate, prompts)) < state.best_loss:
                state.best, state.best_loss = candidate, found
        state.steps += 1
        write_progress(state_file, state)
        advance(state.steps, state.equal_loss, state.best_loss)
    del prompts
    others = [_prompt(model, passage, i, seed, sizes) for i, passage in enumerate(held_out)]
    equal_held_out, best_held_out = loss(equal, others), loss(state.best, others)
    accepted = best_held_out < equal_held_out
    return SearchOutcome(
        calibration=state.best.in_calibration(plain, choice) if accepted else plain,
        accepted=accepted,
        steps=state.steps,
        equal_loss=state.equal_loss,
        best_loss=state.best_loss,
        equal_held_out=equal_held_out,
        best_held_out=best_held_out,
    )


def _split(tokens: list[int], sizes: SearchSizes) -> tuple[list[list[int]], list[list[int]]]:
    length = sizes.n_context + sizes.n_scored
    share = sizes.n_prompts / (sizes.n_prompts + sizes.n_held_out)
    cut = round(share * len(tokens))
    try:
        return passages(tokens[:cut], length, sizes.n_prompts), passages(tokens[cut:], length, sizes.n_held_out)
    except ValueError as error:
        raise ValueError(
            f"texts hold {len(tokens)} tokens, too few to search on some and judge on others ({error}); give more text"
        ) from error


def _prompt(model: nn.Module, passage: list[int], index: int, seed: int, sizes: SearchSizes) -> _Prompt:
    context = passage[: sizes.n_context]
    half = sizes.n_scored // 2
    at = int(np.random.default_rng([seed, index]).integers(8, max(9, sizes.n_context // 2 - half)))
    continuation = passage[sizes.n_context :][: sizes.n_scored - half] + context[at : at + half]
    prefill = shared_prefill(model, context)
    full = prefill.into(cache_maker(model, Arm("full cache"))())
    [reference] = _read(model, [continuation], [full])
    budget = round(sizes.budgets[index % len(sizes.budgets)] * len(context))
    return _Prompt(prefill, continuation, reference, budget)


def _loss(model: nn.Module, calibration: Calibration, choice: FusionChoice, prompts: Sequence[_Prompt]) -> float:
    settings = {"terms": "+".join(choice.terms), "combine": choice.combine}
    caches = []
    for prompt in prompts:
        arm = Arm("candidate", "fusion", {"budget": prompt.budget, **settings})
        caches.append(prompt.prefill.into(cache_maker(model, arm, calibration)()))
    read = _read(model, [prompt.continuation for prompt in prompts], caches)
    _, divergence = token_fidelity(read, mx.stack([prompt.reference for prompt in prompts]))
    return float(divergence.mean(dtype=np.float64))


def _read(model: nn.Module, continuations: Sequence[list[int]], caches: Sequence[list[Any]]) -> mx.array:
    """Log-probabilities float32 [A,n,V] after each token of continuations of one length, each in caches of its own."""
    found = []
    with side_by_side(model, caches) as step:
        for tokens in zip(*continuations, strict=True):
            logits = step(tokens)
            found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            mx.eval(found[-1])
    return mx.stack(found, axis=1)

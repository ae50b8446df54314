"""Calibrate Q-Filters: run text through a model, gather its queries, keep one direction per KV head."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, chain
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.codebooks import with_codebooks
from velox_cache.calibration.losses_together import with_losses
from velox_cache.calibration.score_choice import ScoreChoice
from velox_cache.calibration.score_fit import fit_scores
from velox_cache.calibration.score_sums import ScoreSums
from velox_cache.calibration.sums import LayerSums, whole_model_sums, with_block, with_scores
from velox_cache.distributed.collectives import Group, all_gather_texts, broadcast, failing_together, own_share
from velox_cache.introspection.latents import caches_latents
from velox_cache.introspection.observed_prefill import LayerQueries, cache_layout, observed_prefill
from velox_cache.introspection.query_tap import model_type
from velox_cache.introspection.rope import ModelRopes
from velox_cache.introspection.shard import model_shard
from velox_cache.introspection.weights_digest import weights_digest
from velox_cache.progress import told_progress
from velox_cache.slow_blas import slow_blas_advice
from velox_fn.engine.checks import one_of, whole_number
from velox_fn.engine.codebooks import BITS
from velox_fn.engine.scorers import SCORERS

HELD_OUT_EVERY = 4
"""One block of so many is held out, to judge the learned score by."""
LEAST_TOKENS = 64  # fewer say little about a direction in a space of about as many dimensions
LEAST_DIFFERENT = 4  # fewer are one token repeated, between those that a tokenizer may put before and after a text


class Tokenizer(Protocol):
    """What calibration needs of a tokenizer; mlx_lm's has it."""

    def encode(self, text: str) -> Sequence[int]: ...


def calibrate(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    max_tokens: int | None = None,
    sequence_length: int = 2048,
    prefill_step_size: int = 512,
    model_id: str | None = None,
    dataset: str | None = None,
    progress: bool = True,
    advance: Callable[[int], object] = lambda n_tokens: None,
    group: Group | None = None,
    learned: bool = True,
    losses: bool = False,
    codebooks: int | None = None,
) -> Calibration:
    """Filters of `model`, from the queries it makes of `texts`, and the statistics that other methods score by.

    Each text is cut into sequences of at most `sequence_length` tokens (the paper: 20 of 2,048), each of which runs
    from an empty cache in blocks of `prefill_step_size`; `max_tokens` bounds the tokens of all texts together. Choose
    `sequence_length` near the context that the filters will serve: RoPE turns the mean query with the position. Queries
    are summed up as they come and never kept, so memory does not grow with the text. Every query counts, where the
    paper (arXiv:2503.02812, section 4.2) samples 3,000 per head.

    A layer gets a filter when its attention reads a plain KVCache, also inside a CacheList; the others get None. It
    works whether or not evicting caches are installed on the model. `progress` tells every few seconds on stderr how
    far it is, and warns beforehand where a faster BLAS would help; `advance` is called with the tokens done,
    and with the work on losses (`passages.work_of_losses`).

    group: ranks that each hold the whole model, call this with the same arguments and share out the sequences; some may
    get none. Ranks that hold a model together (`model.shard`, `model.model.pipeline`) need no group: each runs every
    sequence through its part. Both ways every rank gets the whole model's calibration, the same to the last bit.

    learned: whether the score of the method learned is fitted too: to what the rows of each block turn out to be worth
    to the block's own queries. So blocks of 512 or more say most. (2 (D + D_v))^2 numbers per head are held for it,
    twice. Models with latent attention have none.

    losses: whether what budgets cost each head is measured too, for `install(shares="calibrated")`: the model reads up
    to three parts of the texts once more, of up to 1,280 tokens each. Texts of fewer than 384 tokens have none, nor
    have models with latent attention or whose attention does not end with a matrix; `progress` warns why.

    codebooks: bits of a number, 1, 2 or 4, for which codebooks are made too, for `install(codebooks=...)`, of the rows
    of up to 2,048 tokens. Models with latent attention have none.

    Raises ValueError when the texts have fewer than 64 tokens, or fewer than 4 different ones, when the model computes
    attention by hand or from no plain KV cache, or when its queries are not finite; RuntimeError when another rank
    fails or ends.
    """
    if codebooks is not None:
        one_of("codebooks", codebooks, BITS)
        if caches_latents(model):
            raise ValueError("a latent is no key with a value, and has no codebooks; leave codebooks out")
    sequences = _sequences(tokenizer, texts, max_tokens, sequence_length)
    n_tokens = sum(map(len, sequences))
    if n_tokens < LEAST_TOKENS:
        raise ValueError(
            f"texts hold {n_tokens} tokens; calibration needs at least {LEAST_TOKENS}, and a few thousand to be good: "
            "give more text"
        )
    if (n_different := len(set(chain.from_iterable(sequences)))) < LEAST_DIFFERENT:
        raise ValueError(
            f"texts hold {n_different} different tokens, one of them again and again, and such queries and keys say "
            "nothing of those of a real text: give text of the kind that the model will read"
        )
    layout, shard = cache_layout(model), model_shard(model)
    apart = group if shard.group is None else None  # ranks with nothing in common until they add up what they saw
    everyone = shard.group or group
    step = _step_that_holds_out(sequences, prefill_step_size)
    numbered = _numbered(sequences, step)
    own = numbered if apart is None else own_share(numbered, apart, cost=lambda one: len(one[1]))
    shown = progress and (everyone is None or everyone.rank() == 0)
    if shown and (advice := slow_blas_advice()) is not None:
        warnings.warn(advice, stacklevel=2)
    with failing_together(apart):
        sums = _layer_sums(model, own, step, shown, advance, learned=learned and not caches_latents(model))
    if everyone is not None:
        sums, layout = whole_model_sums(sums, layout, model, shard, everyone)
    filters = [_layer_filter(i, sums[i]) if i in sums else None for i in range(len(layout))]
    statistics = [None if layer is None else sums[i].statistics(layer) for i, layer in enumerate(filters)]
    scores = {i: layer.scores for i, layer in sums.items() if layer.scores is not None}
    choice, fits = fit_scores(scores)
    statistics = [layer and replace(layer, **fits.get(i, {})) for i, layer in enumerate(statistics)]
    if everyone is not None:  # machines may round differently
        shared = partial(broadcast, group=everyone)
        if choice is not None:
            choice = ScoreChoice(**json.loads(all_gather_texts(json.dumps(asdict(choice)), everyone)[0]))
        filters = [None if layer is None else shared(layer) for layer in filters]
        statistics = [None if layer is None else layer.mapped(shared) for layer in statistics]
    made = Calibration(
        filters,
        statistics=statistics,
        model_id=model_id,
        n_samples=n_tokens,
        dataset=dataset,
        n_tokens=n_tokens,
        layer_layout=layout,
        terms=tuple(SCORERS),
        scores=choice,
        weights=weights_digest(model),
    )
    if losses:
        made = with_losses(made, model, sequences, shard, everyone, shown=shown, advance=advance)
    if codebooks is not None:
        made = with_codebooks(made, model, sequences, codebooks, shard, everyone, shown=shown)
    return made


def collect_query_activations(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    max_tokens: int | None = None,
    sequence_length: int = 2048,
    prefill_step_size: int = 512,
    progress: bool = False,
) -> list[mx.array | None]:
    """The queries themselves: per layer [H_q,N,D] after RoPE, in the model's dtype; None as in `calibrate`.

    Holds N vectors for every head and layer, where `calibrate` holds none; takes the same text options. Queries of
    layers that share one cache follow each other block by block, so that N may differ between layers.

    Raises ValueError when the texts hold no token, or when the model's queries cannot be observed.
    """
    sequences = _sequences(tokenizer, texts, max_tokens, sequence_length)
    collected: list[list[mx.array]] = [[] for _ in cache_layout(model)]
    for block in _observed_blocks(model, sequences, prefill_step_size, progress):
        for call in block:
            collected[call.layer].append(call.queries[0])
        mx.eval(*(call.queries for call in block))
    return [mx.concatenate(queries, axis=1) if queries else None for queries in collected]


def collect_score_sums(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    max_tokens: int | None = None,
    sequence_length: int = 2048,
    prefill_step_size: int = 512,
    progress: bool = False,
) -> dict[int, ScoreSums]:
    """The sums by layer that `calibrate` fits the score of the method learned to, from the same text options.

    Empty for models with latent attention, and where no block is long enough. Raises ValueError as
    `collect_query_activations` does.
    """
    sequences = _sequences(tokenizer, texts, max_tokens, sequence_length)
    step = _step_that_holds_out(sequences, prefill_step_size)
    learned = not caches_latents(model)
    sums = _layer_sums(model, _numbered(sequences, step), step, progress, learned=learned)
    return {layer: found.scores for layer, found in sums.items() if found.scores is not None}


def sign_agreement(
    calibration: Calibration,
    model: nn.Module,
    tokenizer: Tokenizer,
    text: str,
    *,
    max_tokens: int = 2048,
    prefill_step_size: int = 512,
) -> float:
    """Share of query heads whose mean query on `text` projects positively on the filter of their KV head.

    Near 1 for filters of this model with the right sign (observation 3.1 of the paper), near 0 when the sign is turned,
    near 1/2 for filters of another model or basis. Warns below 0.9.

    Raises ValueError below 0.5, and when the filters do not fit the model's layers, heads or width.
    """
    sequences = _sequences(tokenizer, [text], max_tokens, max_tokens)
    sums = _layer_sums(model, _numbered(sequences, prefill_step_size), prefill_step_size, progress=False)
    if (shard := model_shard(model)).group is not None:
        sums, _ = whole_model_sums(sums, cache_layout(model), model, shard, shard.group)
    n_agreeing = n_heads = 0
    for layer, gram in ((layer, sums_of_layer.queries) for layer, sums_of_layer in sums.items()):
        filters = calibration.filters[layer] if layer < len(calibration.filters) else None
        if filters is None or gram.total.shape[0] % filters.shape[0] or gram.total.shape[1] != filters.shape[1]:
            given = "none" if filters is None else f"one of shape {tuple(filters.shape)}"
            raise ValueError(
                f"layer {layer} has {gram.total.shape[0]} query heads of width {gram.total.shape[1]}, but the "
                f"calibration's filter is {given}; was it made for another model?"
            )
        per_head = mx.repeat(filters, gram.total.shape[0] // filters.shape[0], axis=0)
        projections = np.array(gram.total) * np.array(per_head)
        n_agreeing += int((projections.sum(-1) > 0).sum())
        n_heads += gram.total.shape[0]
    share = n_agreeing / n_heads
    if share < 0.5:
        raise ValueError(
            f"only {share:.0%} of the query heads project positively on their filter: the sign is turned, or the "
            "filters belong to another model; import the authors' files with import_published_filters, or calibrate"
        )
    if share < 0.9:
        warnings.warn(
            f"only {share:.0%} of the query heads project positively on their filter, where well calibrated filters "
            "reach about 99%: they may belong to another model, or to queries before RoPE",
            stacklevel=2,
        )
    return share


def _sequences(
    tokenizer: Tokenizer, texts: Iterable[str], max_tokens: int | None, sequence_length: int
) -> list[list[int]]:
    length = whole_number("sequence_length", sequence_length, 1)
    left = None if max_tokens is None else whole_number("max_tokens", max_tokens, 1)
    sequences: list[list[int]] = []
    for text in [texts] if isinstance(texts, str) else texts:
        if left == 0:
            break
        tokens = list(tokenizer.encode(text))[:left]
        left = None if left is None else left - len(tokens)
        sequences.extend(tokens[start : start + length] for start in range(0, len(tokens), length))
    if not sequences:
        raise ValueError("texts hold no token; give at least one text that is not empty")
    return sequences


def _observed_blocks(
    model: nn.Module, sequences: Sequence[Sequence[int]], prefill_step_size: int, progress: bool
) -> Iterator[list[LayerQueries]]:
    step = whole_number("prefill_step_size", prefill_step_size, 1)
    with told_progress(sum(map(len, sequences)), shown=progress) as told:
        told("calibrating", 0)
        for tokens in sequences:
            even = -(-len(tokens) // _n_blocks(tokens, step))  # no short block at the end, whose rows nobody asks for
            for block in observed_prefill(model, tokens, even):
                if not block:
                    raise ValueError(
                        f"no attention layer of model type {model_type(model)!r} reads a plain KV cache through "
                        "mlx_lm's scaled_dot_product_attention, so it has no queries to calibrate on; use a method "
                        "that needs no calibration"
                    )
                yield block
                told("calibrating", block[0].queries.shape[2])


def _layer_sums(
    model: nn.Module,
    numbered: Sequence[tuple[int, Sequence[int]]],
    prefill_step_size: int,
    progress: bool,
    advance: Callable[[int], object] = lambda n_tokens: None,
    *,
    learned: bool = False,
) -> dict[int, LayerSums]:
    """The sums by layer over sequences with the number of their first block, which says what is held out."""
    sums: dict[int, LayerSums] = {}
    read = ModelRopes(model)
    ropes = [read.if_known(layer) for layer in range(len(cache_layout(model)))]  # now: ranks of a model run in step
    numbers = (first + i for first, tokens in numbered for i in range(_n_blocks(tokens, prefill_step_size)))
    blocks = _observed_blocks(model, [tokens for _, tokens in numbered], prefill_step_size, progress)
    for number, block in zip(numbers, blocks, strict=True):
        for call in block:
            layer = with_block(sums.get(call.layer), call, ropes[call.layer])
            if learned:
                layer = with_scores(layer, call, held_out=number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1)
            sums[call.layer] = layer
            mx.eval(layer.arrays())
        advance(block[0].queries.shape[2])
    return sums


def _step_that_holds_out(sequences: Sequence[Sequence[int]], prefill_step_size: int) -> int:
    """Tokens of a block, so few that one block of them all is held out."""
    step = whole_number("prefill_step_size", prefill_step_size, 1)
    return min(step, max(1, sum(map(len, sequences)) // HELD_OUT_EVERY))


def _numbered(sequences: Sequence[Sequence[int]], step: int) -> list[tuple[int, Sequence[int]]]:
    """Each sequence with the number of its first block, over all of them."""
    firsts = accumulate((_n_blocks(tokens, step) for tokens in sequences), initial=0)
    return list(zip(firsts, sequences, strict=False))


def _n_blocks(tokens: Sequence[int], step: int) -> int:
    return -(-len(tokens) // step)


def _layer_filter(layer: int, sums: LayerSums) -> mx.array:
    try:
        return sums.filters()
    except ValueError as error:
        raise ValueError(f"layer {layer} cannot be calibrated: {error}") from error

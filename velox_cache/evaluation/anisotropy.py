"""Whether a model's queries drift along one direction per head: the premise of Q-Filters.

Source: arXiv:2503.02812, section 3.1 and figure 2; `component_means` is its panel c.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.introspection.observed_prefill import observed_prefill
from velox_fn.directions.query_gram import QueryGram, query_gram_init, query_gram_update
from velox_fn.engine.records import arrays


@dataclass(frozen=True, eq=False)
class Anisotropy:
    """All layers with a plain KV cache in order, float64; per query head [heads] unless said."""

    mean_projection: np.ndarray[Any, Any]  # of held-out queries on the sign-fixed leading vector of the first ones
    leading_ratio: np.ndarray[Any, Any]  # |mean projection| of held-out queries on it / mean over the other components
    top_energy: np.ndarray[Any, Any]  # share of the squared norm of the queries in the leading component, 0 to 1
    component_means: tuple[np.ndarray[Any, Any], ...]  # per layer [D]: |mean projection| of held-out queries on each
    # component, the leading one first, mean over the layer's heads; layers may differ in D

    @property
    def positive_share(self) -> float:
        """Share of heads whose held-out mean projection is positive: observation 3.1."""
        return float((self.mean_projection > 0).mean())


def anisotropy(
    model: nn.Module, tokens: Sequence[int], held_out: Sequence[int], *, prefill_step_size: int = 512
) -> Anisotropy:
    """Measure the queries that `model` makes of `tokens`, and the sign of their drift on `held_out`.

    The leading vector v_1 is that of the uncentred queries, its sign that of the queries' sum, as in calibration. On
    the tokens it was fitted to, the mean projection is positive by construction; hence the held-out text.

    Raises ValueError when either text is empty or the model's queries cannot be observed.
    """
    fitted, seen = (_query_grams(model, text, prefill_step_size) for text in (tokens, held_out))
    parts = [head_anisotropy(fitted[layer], seen[layer]) for layer in sorted(fitted)]
    return Anisotropy(
        np.concatenate([part.mean_projection for part in parts]),
        np.concatenate([part.leading_ratio for part in parts]),
        np.concatenate([part.top_energy for part in parts]),
        tuple(means for part in parts for means in part.component_means),
    )


def head_anisotropy(fitted: QueryGram, held_out: QueryGram) -> Anisotropy:
    """The same from the sums over the queries of one layer. All in float64."""
    gram, mean = np.array(fitted.gram), np.array(fitted.total) / float(np.array(fitted.count))
    held_out_mean = np.array(held_out.total) / float(np.array(held_out.count))
    energies, vectors = np.linalg.eigh(gram)  # ascending; vectors in columns
    signs = np.sign((vectors[..., -1] * mean).sum(-1))
    projections = np.einsum("hd,hdk->hk", held_out_mean, vectors)
    sizes = np.abs(projections)[:, ::-1]
    return Anisotropy(
        signs * projections[:, -1],
        sizes[:, 0] / np.maximum(sizes[:, 1:].mean(-1), np.finfo(np.float64).tiny),
        energies[:, -1] / energies.sum(-1),
        (sizes.mean(0),),
    )


def _query_grams(model: nn.Module, tokens: Sequence[int], prefill_step_size: int) -> dict[int, QueryGram]:
    if not tokens:
        raise ValueError("there are no tokens to measure queries on; give text")
    grams: dict[int, QueryGram] = {}
    for block in observed_prefill(model, tokens, prefill_step_size):
        for call in block:
            empty = query_gram_init(call.queries.shape[1], call.queries.shape[3])
            grams[call.layer] = query_gram_update(grams.get(call.layer, empty), call.queries)
        mx.eval([arrays(gram) for gram in grams.values()])
    if not grams:
        raise ValueError("no layer of this model reads a plain KV cache, so it has no queries to measure")
    return grams

"""Fit the learned score to its sums: ridge regression in closed form, chosen by blocks held out.

Features are in units of their spread in that head, so that one ridge serves all. What comes out is scaled so that a
unit of score is one of the target, a logarithm of attention, in which age is measured too.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.calibration.row_worth import AGES
from velox_cache.calibration.score_choice import FEATURES, ScoreChoice
from velox_cache.calibration.score_sums import ScoreSums
from velox_fn.methods.learned import OF_ROWS

RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
Floats = np.ndarray[Any, np.dtype[np.float64]]
Moments = tuple[Floats, Floats, Floats]
"""gram, cross and squares of `ScoreSums`, of one half."""


def fit_scores(layers: Mapping[int, ScoreSums]) -> tuple[ScoreChoice | None, dict[int, dict[str, mx.array]]]:
    """The choice for this model, and per layer the arrays of its learned score, as statistics hold them; None and
    nothing where there are no sums."""
    if not layers:
        return None, {}
    choice = best_choice(layers)
    correlations = held_out_correlations(layers, choice)
    return choice, {
        index: {**fitted(sums, choice), "score_correlation": mx.array(correlations[index].astype(np.float32))}
        for index, sums in layers.items()
    }


def best_choice(layers: Mapping[int, ScoreSums]) -> ScoreChoice:
    """The features and ridge whose score correlates most with the target on blocks held out, in the mean over heads;
    the simplest where none are."""
    choices = [ScoreChoice(features, ridge) for features, ridge in product(FEATURES, RIDGES)]
    ranked = [(_mean(held_out_correlations(layers, choice).values()), choice) for choice in choices]
    return max(ranked, key=lambda pair: pair[0])[1]


def held_out_correlations(layers: Mapping[int, ScoreSums], choice: ScoreChoice) -> dict[int, Floats]:
    """Per layer the correlations [H] of score and target on blocks held out, fitted to the others; 0 where none are."""
    found = {}
    for index, sums in layers.items():
        weights = _weights(_half(sums, 0), sums.head_dim, choice)
        found[index] = _correlations(_half(sums, 1), weights)
    return found


def fitted(sums: ScoreSums, choice: ScoreChoice) -> dict[str, mx.array]:
    """The arguments of the method learned for one layer, float32, fitted to all blocks."""
    fit, held = _half(sums, 0), _half(sums, 1)
    gram, cross = fit[0] + held[0], fit[1] + held[1]
    head_dim = sums.head_dim
    weights = _weights((gram, cross, fit[2] + held[2]), head_dim, choice)
    variance = _variances(gram, weights)
    covariance = np.einsum("hf,hf->h", weights, cross)
    weights = weights * np.where(variance > 0, covariance / np.where(variance > 0, variance, 1), 0)[:, None]
    value_dim = weights.shape[1] // 2 - head_dim
    ends = np.cumsum([head_dim, head_dim, value_dim])
    parts = dict(zip(OF_ROWS, np.split(weights, ends, axis=1), strict=True))
    parts["score_age"] = age_slopes(sums)
    return {name: mx.array(part.astype(np.float32)) for name, part in parts.items()}


def age_slopes(sums: ScoreSums) -> Floats:
    """By how much log attention falls per logarithm of age [H], by least squares over the ages; not below 0."""
    by_age, n_pairs = np.array(sums.by_age), np.array(sums.n_pairs)
    seen = (n_pairs > 0).all(0) & (by_age > 0).all(0)
    if seen.sum() < 2:
        return np.zeros(len(by_age))
    log_age = np.log(np.sqrt(np.multiply(AGES[:-1], AGES[1:])))[seen]
    log_age -= log_age.mean()
    slopes: Floats = np.log(by_age[:, seen] / n_pairs[:, seen]) @ log_age / np.square(log_age).sum()
    return np.maximum(-slopes, 0)


def _half(sums: ScoreSums, half: int) -> Moments:
    gram, cross, squares = (np.array(whole)[:, half] for whole in (sums.gram, sums.cross, sums.squares))
    return gram, cross, squares


def _weights(sums: Moments, head_dim: int, choice: ScoreChoice) -> Floats:
    """The regression's weights [H,F], 0 for features that the choice leaves out."""
    gram, cross, _ = sums
    n_features = gram.shape[1]
    value_dim = n_features // 2 - head_dim
    part_of = np.repeat(["keys", "key_squares", "values", "value_squares"], [head_dim] * 2 + [value_dim] * 2)
    used = np.isin(part_of, choice.features.split("+"))
    gram, cross = gram[:, used][:, :, used], cross[:, used]
    spread = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))  # not divided by the rows, and the ridge takes 1 for all
    spread = np.where(spread > 0, spread, 1)
    gram = gram / (spread[:, :, None] * spread[:, None])
    weights = np.zeros((len(gram), n_features))
    solved = np.linalg.solve(gram + choice.ridge * np.eye(gram.shape[1]), (cross / spread)[..., None])[..., 0]
    weights[:, used] = solved / spread
    return weights


def _correlations(sums: Moments, weights: Floats) -> Floats:
    gram, cross, squares = sums
    together = np.einsum("hf,hf->h", weights, cross)
    apart = _variances(gram, weights) * squares
    found: Floats = together / np.sqrt(np.where(apart > 0, apart, 1))
    return found


def _variances(gram: Floats, weights: Floats) -> Floats:
    found: Floats = ((gram @ weights[..., None])[..., 0] * weights).sum(-1)
    return found


def _mean(parts: Iterable[Floats]) -> float:
    return float(np.concatenate(list(parts)).mean())

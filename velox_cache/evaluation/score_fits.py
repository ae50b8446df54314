"""How well a row's worth can be told from the row itself: fits of the learned score by features and ridge."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from velox_cache.calibration.score_choice import FEATURES, ScoreChoice
from velox_cache.calibration.score_fit import RIDGES, best_choice, held_out_correlations
from velox_cache.calibration.score_sums import ScoreSums


@dataclass(frozen=True, eq=False)
class ScoreFit:
    """One choice of features and ridge."""

    choice: ScoreChoice
    per_head: np.ndarray[Any, Any]  # correlation on blocks held out, float64 [heads of all layers]
    chosen: bool  # by `velox calibrate`, for this model and text


def score_fits(layers: Mapping[int, ScoreSums]) -> list[ScoreFit]:
    """Every choice, fitted to three blocks of four and held against the others. layers: by `collect_score_sums`.

    Raises ValueError when there are no sums.
    """
    if not layers:
        raise ValueError("no layer's rows have a worth: give a model without latent attention, and more text")
    best = best_choice(layers)
    choices = [ScoreChoice(features, ridge) for features, ridge in product(FEATURES, RIDGES)]
    return [
        ScoreFit(choice, np.concatenate(list(held_out_correlations(layers, choice).values())), choice == best)
        for choice in choices
    ]

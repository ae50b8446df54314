"""Budgets per layer by a rule: lists for `install(budget=...)` of the same total as one budget for all layers."""

from collections.abc import Sequence

import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.installation.given_calibration import GivenCalibration, loaded
from velox_cache.installation.grouping import grouped, tier_sizes
from velox_cache.installation.least_loss import Floats, least_loss
from velox_cache.introspection.layer_changes import layer_similarities
from velox_cache.introspection.plan import plan_layers
from velox_cache.introspection.shard import model_shard
from velox_cache.recommended import RECOMMENDED_METHOD
from velox_fn.engine import checks

_LEAST_SHARE, _MOST_SHARE = 1 / 16, 1 / 4  # between which half of it and the double were measured
_TOKENS = 1024  # that `squeeze_budgets` reads at most
_LEAST_CHANGED = 2  # of the groups of `squeeze_budgets`


def pyramid_budgets(model: nn.Module, budget: int, *, beta: float = 20, window: int = 8) -> list[int]:
    """Budgets that fall with depth, in equal steps: deep layers attend to few rows.

    Every layer has `window` rows. Of the others, k on average, the last of m layers has k / beta and the first
    2 k - k / beta.

    Source: PyramidKV (arXiv:2406.02069), section 4.2, where the total of the other rows is m k, and `window` is alpha.

    Differs from the paper:

    - The steps between the ends are (first - last) / (m - 1), as in the released code, and not / m, so that the ends
      are met and the total is m k.
    - Layers count that install() bounds. Those that it leaves alone get `budget`, which nobody reads.
    - Which rows stay is the method's affair. The paper's choice is that of snapkv, with its obs_window as `window`.

    Args:
        model: whose caches are to be bounded.
        budget: rows per layer on average, `window` included.
        beta: how many times the average the last layer's is smaller, at least 1.
        window: rows that every layer has. Give what the method protects (n_sink and its recent rows) and one more.

    Returns:
        One number per entry of the prompt cache. Those of bounded layers sum to their number times `budget`.

    Raises:
        ValueError: a number cannot work, or the model is one rank's part of a pipeline.
    """
    budget, window = checks.rows_of_budget(budget), checks.whole_number("window", window, 0)
    if checks.above_zero("beta", beta) < 1:
        raise ValueError(f"beta must be at least 1, at which all layers get the same, got {beta!r}")
    if window >= budget:
        raise ValueError(f"window={window} leaves nothing of budget={budget} to hand out; take a larger budget")
    bounded = _bounded(model)
    last = (budget - window) / beta
    return _listed(model, bounded, window + np.linspace(2 * (budget - window) - last, last, len(bounded)), budget)


def squeeze_budgets(model: nn.Module, tokens: Sequence[int], budget: int, *, share: float = 0.3) -> list[int]:
    """Fewer rows for layers that hardly change what they are given, and more for the others.

    The model reads up to 1,024 tokens. Layers fall into three groups by the cosine similarity of what goes into them
    and what comes out. Those of the group that changes least get `share` of the budget, and what they give up goes to
    all others alike.

    Source: SqueezeAttention (arXiv:2404.04793), Algorithm 1, where `share` is p.

    Differs from the paper:

    - A layer is looked at as a whole. The paper looks before and after its attention, a place that has no common name.
    - The groups are those of the smallest squared distances to their means, found exactly. The paper runs k-means.
    - Budgets are set once, from this text, and not anew from each prompt.
    - Layers count that install() bounds, if there are more than three. Those left alone get `budget`.

    Args:
        model: whose caches are to be bounded.
        tokens: a text of the kind that the model will read.
        budget: rows per layer on average.
        share: of the budget, for the group that changes least, above 0 and below 1.

    Returns:
        One number per entry of the prompt cache. Those of bounded layers sum to their number times `budget`.

    Raises:
        ValueError: a number cannot work, there are no tokens, or the model is one rank's part of a pipeline.
    """
    budget = checks.rows_of_budget(budget)
    if checks.above_zero("share", share) >= 1:
        raise ValueError(f"share must be below 1, it is that of the budget which the least layers get, got {share!r}")
    tokens = checks.whole_numbers("tokens", tokens, 0)
    if not tokens:
        raise ValueError("no tokens are given, from which the change of each layer could be measured; give a text")
    bounded = _bounded(model)
    similar = layer_similarities(model, tokens[:_TOKENS])
    groups = grouped([similar[entry] for entry in bounded])
    least = groups == _LEAST_CHANGED
    more = budget * (len(bounded) - share * least.sum()) / max(len(bounded) - least.sum(), 1)
    return _listed(model, bounded, np.where(least, share * budget, more), budget)


def calibrated_budgets(calibration: GivenCalibration, budget: int, *, method: str = RECOMMENDED_METHOD) -> list[int]:
    """Budgets that make the sum of the losses smallest that the calibration has measured of the method's scores.

    A layer's loss at a number of rows is the error of its attention's output, in units of what it is added to
    (`calibration.row_losses`); a budget counts as its share of the context of that measurement, at least 1/16 and at
    most 1/4. Each layer has half of `budget` at least, and at most 3/4 of such a context. Where the context is longer
    than the one measured, more rows would be needed for the same loss in every layer, and the proportions stay.

    Args:
        calibration: of the whole model, with losses, or the path of its file.
        budget: rows per layer on average.
        method: whose rows leave, by its name.

    Returns:
        One number per entry of the prompt cache. Those of bounded layers sum to their number times `budget`.

    Raises:
        ValueError: a number cannot work, or the calibration has no losses of this method.
    """
    budget = checks.whole_number("budget", budget, 1)
    calibration = loaded(calibration)
    losses = _losses(calibration, method)
    wanted = _wanted(calibration, np.stack([of_heads.sum(0) for of_heads in losses.values()]), budget)
    found = [budget] * len(calibration.filters)
    for layer, rows in zip(losses, _rounded(wanted, budget), strict=True):
        found[layer] = rows
    return found


def calibrated_head_budgets(
    calibration: GivenCalibration, budget: int, *, method: str = RECOMMENDED_METHOD
) -> list[int | list[int]]:
    """As `calibrated_budgets`, for each KV head by itself, with at most three sizes in a layer (tiers).

    Args:
        calibration: of the whole model, with losses, or the path of its file.
        budget: rows per KV head on average.
        method: whose rows leave, by its name.

    Returns:
        One entry per entry of the prompt cache: a list with a number for each KV head of a bounded layer, which sum to
        the number of all these heads times `budget`; `budget` for the others.

    Raises:
        ValueError: a number cannot work, or the calibration has no losses of this method.
    """
    budget = checks.whole_number("budget", budget, 1)
    calibration = loaded(calibration)
    losses = _losses(calibration, method)
    wanted = _wanted(calibration, np.concatenate(list(losses.values())), budget)
    of_layers = np.split(wanted, np.cumsum([len(of_heads) for of_heads in losses.values()])[:-1])
    found: list[int | list[int]] = [budget] * len(calibration.filters)
    for layer, rows in zip(losses, tier_sizes(of_layers, budget), strict=True):
        found[layer] = rows
    return found


def _losses(calibration: Calibration, method: str) -> dict[int, Floats]:
    """Of each layer that has them, what each share costs each head, float64 [H,S]. ValueError where there are none."""
    table = calibration.losses
    if table is None:
        raise ValueError(
            "the calibration holds no losses, from which the layers' budgets could follow: nobody asked for "
            "them, it was made on fewer than 384 tokens, or for a model whose attention cannot be followed; calibrate "
            "again with losses=True, or `velox calibrate --losses`"
        )
    if method not in table.methods:
        raise ValueError(
            f"the calibration holds losses of {', '.join(table.methods)}, and not of {method}, whose scores are not "
            "known before a text is; take one of them, or budgets by another rule, such as pyramid_budgets"
        )
    return {
        layer: np.array(statistics.row_losses, np.float64)[:, table.methods.index(method)]
        for layer, statistics in enumerate(calibration.statistics)
        if statistics is not None and statistics.row_losses is not None
    }


def _wanted(calibration: Calibration, losses: Floats, budget: int) -> Floats:
    """Rows of each of n, float64 [n], `budget` in the mean, by their losses [n,S] at the calibration's shares."""
    table = calibration.losses
    assert table is not None
    share = min(max(budget / table.n_context, _LEAST_SHARE), _MOST_SHARE)
    return least_loss(np.array(table.shares), losses, share) / share * budget


def _bounded(model: nn.Module) -> list[int]:
    if model_shard(model).pipelined:
        raise ValueError(
            "this model is one rank's part of a pipeline, which does not know the other layers; make the budgets from "
            "the whole model, and give every rank the list"
        )
    return [entry.layer for entry in plan_layers(model) if entry.bounded]


def _listed(model: nn.Module, bounded: Sequence[int], wanted: np.ndarray, budget: int) -> list[int]:
    of_layer = dict(zip(bounded, _rounded(wanted, budget), strict=True))
    return [of_layer.get(entry.layer, budget) for entry in plan_layers(model)]


def _rounded(wanted: np.ndarray, budget: int) -> list[int]:
    """Whole numbers, `budget` in the mean: what rounding down leaves goes to those with the largest fractions."""
    rounded = np.floor(wanted + 1e-9).astype(int)
    left = len(rounded) * budget - int(rounded.sum())
    rounded[np.argsort(rounded - wanted, kind="stable")[:left]] += 1
    return [int(rows) for rows in rounded]

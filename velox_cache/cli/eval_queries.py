"""The measurements of `velox eval` that look at queries: drift, predicted attention, fits of scores."""

import argparse
from typing import Any

from velox_cache.cli.eval_readings import text_tokens
from velox_cache.cli.eval_synthetic import Result
from velox_cache.cli.model_argument import load_model


def anisotropy(arguments: argparse.Namespace) -> Result:
    from velox_cache.calibration.texts import calibration_texts
    from velox_cache.evaluation.anisotropy import anisotropy

    model, tokenizer = load_model(arguments.model)
    fitted = list(tokenizer.encode("\n".join(calibration_texts())))[: 2 * arguments.context]
    found = anisotropy(model, fitted, text_tokens(arguments, tokenizer, arguments.context))
    row: dict[str, Any] = {
        "query heads": len(found.mean_projection),
        "positive mean projection": found.positive_share,
        "leading component / others, median": float(_median(found.leading_ratio)),
        "energy of the leading component": float(found.top_energy.mean()),
        "mean on components 1 / 2 / 3 / 4": _over_layers([means[:4] for means in found.component_means]),
        "on the others": _over_layers([means[4:].mean(keepdims=True) for means in found.component_means]),
    }
    numbers = {name: getattr(found, name).tolist() for name in ("mean_projection", "leading_ratio", "top_energy")}
    numbers["component_means"] = [means.tolist() for means in found.component_means]
    return [numbers | row], [row]


def attention(arguments: argparse.Namespace) -> Result:
    from velox_cache import load_calibration
    from velox_cache.evaluation.attention import default_scorers, score_attention
    from velox_cache.harness.texts import text_named

    model, tokenizer = load_model(arguments.model)
    scorers = default_scorers(load_calibration(arguments.calibration))
    found = score_attention(model, tokenizer, text_named(arguments.text), scorers, n_tokens=arguments.context)
    rows = [{"score": one.scorer, "Spearman, mean": one.mean, "right sign": one.sign_correct} for one in found]
    return [row | {"per_head": one.per_head.tolist()} for row, one in zip(rows, found, strict=True)], list(rows)


def score_fits(arguments: argparse.Namespace) -> Result:
    from velox_cache.calibration.calibrating import collect_score_sums
    from velox_cache.calibration.texts import calibration_texts
    from velox_cache.evaluation.score_fits import score_fits

    model, tokenizer = load_model(arguments.model)
    sums = collect_score_sums(model, tokenizer, calibration_texts(), max_tokens=arguments.max_tokens, progress=True)
    found = score_fits(sums)
    shown: dict[str, dict[str, Any]] = {}
    for one in found:
        mark = "*" if one.chosen else ""
        row = shown.setdefault(one.choice.features, {"features / ridge": one.choice.features})
        row[f"{one.choice.ridge:g}"] = f"{one.per_head.mean():.3f}{mark}"
    records = [vars(one.choice) | {"per_head": one.per_head.tolist(), "chosen": one.chosen} for one in found]
    return records, list(shown.values())


def _over_layers(means: list[Any]) -> str:
    return " / ".join(f"{sum(layer) / len(means):.3g}" for layer in zip(*means, strict=True))


def _median(values: Any) -> Any:
    import numpy as np

    return np.median(values)

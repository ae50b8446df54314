"""The measurements of `velox eval` that read a text with bounded caches beside the full one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from velox_cache.cli.eval_synthetic import Records, Result
from velox_cache.cli.method_arguments import method_settings
from velox_cache.cli.model_argument import load_model

if TYPE_CHECKING:
    from velox_cache import Calibration
    from velox_cache.harness.arm_readings import ArmReading
    from velox_cache.harness.arms import Arm


def reading(arguments: argparse.Namespace) -> Result:
    return _read(arguments, [_arm(arguments)])


def recency(arguments: argparse.Namespace) -> Result:
    import dataclasses

    arm = _arm(arguments)
    budget = arm.budget or 512
    recents = [0, *(budget * eighths // 8 for eighths in (1, 2, 4, 6, 7))]
    return _read(
        arguments,
        [dataclasses.replace(arm, label=f"recent={n}", settings={**arm.settings, "recent": n}) for n in recents],
    )


def curdkv(arguments: argparse.Namespace) -> Result:
    from velox_cache import load_calibration
    from velox_cache.evaluation.curdkv_variants import curdkv_variants

    model, tokenizer = load_model(arguments.model)
    calibration = load_calibration(arguments.calibration) if arguments.calibration else None
    found = curdkv_variants(
        model,
        text_tokens(arguments, tokenizer, arguments.context + arguments.scored),
        arguments.budget,
        n_context=arguments.context,
        calibration=calibration,
        by_token=arguments.by_token,
    )
    rows = [_reading_row(label, one) for label, one in found.items()]
    return rows, rows


def intervals(arguments: argparse.Namespace) -> Result:
    from velox_cache.evaluation.intervals import by_interval, read_at_intervals
    from velox_cache.harness.texts import passages, text_named
    from velox_cache.installation.layer_arguments import calibration_for
    from velox_cache.known_methods import method_named

    model, tokenizer = load_model(arguments.model)
    calibration = _calibration(arguments, model, tokenizer)
    settings = method_settings(arguments)
    peak = settings.pop("budget", 512)
    tokens = list(tokenizer.encode(text_named(arguments.text)))
    read = passages(tokens, arguments.context + arguments.scored, arguments.passages)
    found = read_at_intervals(
        model,
        read,
        arguments.method,
        peak,
        n_context=arguments.context,
        settings=settings,
        calibration=calibration_for(method_named(arguments.method), calibration, settings),
        share=arguments.share,
    )
    return [vars(one) for one in found], by_interval(found)


def saved_intervals(arguments: argparse.Namespace) -> Result:
    from velox_cache.evaluation.intervals import by_interval, saved_readings

    rows: Records = [
        {"method": method, **row}
        for method, found in saved_readings(Path(arguments.folder)).items()
        for row in by_interval(found)
    ]
    return rows, rows


def quantised(arguments: argparse.Namespace) -> Result:
    from velox_cache.evaluation.equal_bytes import by_share, read_at_equal_bytes
    from velox_cache.harness.texts import passages, text_named

    settings = method_settings(arguments)
    group_size = settings.pop("group_size", 64)
    given = [name for name in ("budget", "key_bits", "value_bits", "codebooks") if name in settings]
    if given:
        raise ValueError(f"{' and '.join(given)} cannot be given: all widths are read, in rows of equal bytes")
    model, tokenizer = load_model(arguments.model)
    calibration = _calibration(arguments, model, tokenizer)
    tokens = list(tokenizer.encode(text_named(arguments.text)))
    found = read_at_equal_bytes(
        model,
        passages(tokens, arguments.context + arguments.scored, arguments.passages),
        arguments.method,
        n_context=arguments.context,
        settings=settings,
        calibration=calibration,
        group_size=group_size,
    )
    return [vars(one) for one in found], by_share(found)


def saved_quantised(arguments: argparse.Namespace) -> Result:
    from velox_cache.evaluation.equal_bytes import by_share, saved_readings

    rows = by_share(saved_readings(Path(arguments.folder)))
    return rows, rows


def stalled_offset(arguments: argparse.Namespace) -> Result:
    from velox_cache.evaluation.stalled_offset import stalled_offset
    from velox_cache.harness.arms import cache_maker

    arm = _arm(arguments)
    model, tokenizer = load_model(arguments.model)
    calibration = _calibration(arguments, model, tokenizer)
    tokens = text_tokens(arguments, tokenizer, arguments.context + arguments.scored)
    found = stalled_offset(model, tokens, cache_maker(model, arm, calibration), n_context=arguments.context)
    rows: Records = [
        {
            "positions are": one.positions,
            "perplexity": one.perplexity,
            "KL to full": one.fidelity.kl_divergence,
            "same next token": one.fidelity.agreement,
        }
        for one in found
    ]
    return rows, rows


def _read(arguments: argparse.Namespace, arms: "list[Arm]") -> Result:
    from velox_cache.harness.arm_readings import read_arms
    from velox_cache.harness.arms import FULL, cache_maker

    model, tokenizer = load_model(arguments.model)
    calibration = _calibration(arguments, model, tokenizer)
    tokens = text_tokens(arguments, tokenizer, arguments.context + arguments.scored)
    makers = [cache_maker(model, arm, calibration) for arm in (FULL, *arms)]
    found = read_arms(model, tokens, makers, n_context=arguments.context, block=arguments.block)
    rows = [_reading_row(arm.label, one) for arm, one in zip((FULL, *arms), found, strict=True)]
    return rows, rows


def _reading_row(label: str, one: "ArmReading") -> dict[str, Any]:
    return {
        "cache": label,
        "rows kept": one.usage.rows_kept,
        "perplexity": one.perplexity,
        "KL to full": one.fidelity.kl_divergence,
        "same next token": one.fidelity.agreement,
    }


def _arm(arguments: argparse.Namespace) -> "Arm":
    from velox_cache.harness.arms import Arm

    return Arm(arguments.method, arguments.method, method_settings(arguments))


def _calibration(arguments: argparse.Namespace, model: Any, tokenizer: Any) -> "Calibration | None":
    """What the method takes: the file's, or the one of these weights, made where there is none, as `install` does."""
    from velox_cache.installation.given_calibration import calibration_of
    from velox_cache.introspection.plan import plan_layers
    from velox_cache.known_methods import method_named

    layer = next((entry.layer for entry in plan_layers(model) if entry.bounded), 0)
    return calibration_of(
        method_named(arguments.method),
        method_settings(arguments),
        arguments.calibration,
        not arguments.no_calibrate,
        tokenizer,
        model,
        layer,
    )


def text_tokens(arguments: argparse.Namespace, tokenizer: Any, n_tokens: int) -> list[int]:
    """The first tokens of --text, by the model's own tokenizer. ValueError when it holds fewer."""
    from velox_cache.harness.texts import passages, text_named

    return passages(list(tokenizer.encode(text_named(arguments.text))), n_tokens, 1)[0]

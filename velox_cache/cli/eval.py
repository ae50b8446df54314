"""Run one measurement by itself. `velox compare` runs most of them together, for many methods and budgets."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from velox_cache.cli.calibration_argument import add_calibration_argument
from velox_cache.cli.eval_synthetic import SYNTHETIC, Records, Result
from velox_cache.cli.method_arguments import METHOD_EXAMPLES, add_method_arguments, install_method, method_settings
from velox_cache.cli.model_argument import add_model_argument, load_model
from velox_cache.distributed.launcher import launched_rank

if TYPE_CHECKING:
    from velox_cache.harness.arm_readings import ArmReading
    from velox_cache.harness.arms import Arm


EXAMPLES = f"""examples:
  velox eval anisotropy smollm2-135m
  velox eval attention smollm2-135m --calibration calibration.npz
  velox eval perplexity smollm2-135m --method qfilters --budget 256 --calibration calibration.npz
  velox eval recency smollm2-135m --method qfilters --budget 128 --calibration calibration.npz
  velox eval prefill --method qfilters --budget 512
  velox eval intervals smollm2-135m --method fusion --budget 512 --context 1024 --calibration calibration.npz
  velox eval memory smollm2-135m --method streaming_llm --budget 512
  velox eval synthetic qfilters
  velox eval synthetic curdkv
  velox eval curdkv smollm2-135m --budget 256 --context 768 --calibration calibration.npz

{METHOD_EXAMPLES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each measurement."""
    kinds = parser.add_subparsers(dest="kind", metavar="MEASUREMENT", required=True, title="measurements")
    for name, (summary, takes_model, takes_method) in _KINDS.items():
        kind = kinds.add_parser(name, help=summary, description=summary)
        if takes_model:
            add_model_argument(kind)
            kind.add_argument("--text", default="documentation", metavar="T", help="see `velox compare`, or a file")
            kind.add_argument("--context", type=int, default=512, metavar="N", help="tokens read (default: 512)")
        if takes_method:
            add_method_arguments(kind)
        if name == "curdkv":
            kind.add_argument("--budget", type=int, default=256, metavar="N", help="rows kept (default: 256)")
            add_calibration_argument(kind, "what `velox calibrate` made, for the Q-Filters arm")
            kind.add_argument("--by-token", action="store_true", help="also score token by token; slow")
        if name == "intervals":
            kind.add_argument("--passages", type=int, default=4, metavar="N", help="of the text (default: 4)")
            kind.add_argument(
                "--share", type=float, metavar="X", help="recent part of the budget (default: that of install)"
            )
        if name in ("perplexity", "fidelity", "recency", "curdkv", "intervals"):
            kind.add_argument("--scored", type=int, default=96, metavar="N", help="tokens predicted (default: 96)")
        if name == "attention":
            add_calibration_argument(kind, "what `velox calibrate` made", required=True)
        if name == "synthetic":
            kind.add_argument("subject", choices=tuple(SYNTHETIC), help="which method's made-up data")
        kind.add_argument("--json", metavar="FILE", help="write every number there")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, write JSON if asked to."""
    from rich.console import Console
    from rich.table import Table

    records, shown = _RUN[arguments.kind](arguments)
    if arguments.json and not launched_rank():
        Path(arguments.json).write_text(json.dumps(records, indent=1))
    table = Table()
    for heading, value in shown[0].items():
        table.add_column(heading.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for record in shown:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in record.values()))
    Console().print(table)
    return 0


def _anisotropy(arguments: argparse.Namespace) -> Result:
    from velox_cache.calibration.texts import calibration_texts
    from velox_cache.evaluation.anisotropy import anisotropy

    model, tokenizer = load_model(arguments.model)
    fitted = list(tokenizer.encode("\n".join(calibration_texts())))[: 2 * arguments.context]
    found = anisotropy(model, fitted, _tokens(arguments, tokenizer, arguments.context))
    row: dict[str, Any] = {
        "query heads": len(found.mean_projection),
        "positive mean projection": found.positive_share,
        "leading component / others, median": float(_median(found.leading_ratio)),
        "energy of the leading component": float(found.top_energy.mean()),
    }
    return [{name: array.tolist() for name, array in vars(found).items()} | row], [row]


def _attention(arguments: argparse.Namespace) -> Result:
    from velox_cache import load_calibration
    from velox_cache.evaluation.attention import default_scorers, score_attention
    from velox_cache.harness.texts import text_named

    model, tokenizer = load_model(arguments.model)
    scorers = default_scorers(load_calibration(arguments.calibration))
    found = score_attention(model, tokenizer, text_named(arguments.text), scorers, n_tokens=arguments.context)
    rows = [{"score": one.scorer, "Spearman, mean": one.mean, "right sign": one.sign_correct} for one in found]
    return [row | {"per_head": one.per_head.tolist()} for row, one in zip(rows, found, strict=True)], list(rows)


def _reading(arguments: argparse.Namespace) -> Result:
    return _read(arguments, [_arm(arguments)])


def _recency(arguments: argparse.Namespace) -> Result:
    import dataclasses

    arm = _arm(arguments)
    budget = arm.budget or 512
    recents = [0, *(budget * eighths // 8 for eighths in (1, 2, 4, 6, 7))]
    return _read(
        arguments,
        [dataclasses.replace(arm, label=f"recent={n}", settings={**arm.settings, "recent": n}) for n in recents],
    )


def _read(arguments: argparse.Namespace, arms: "list[Arm]") -> Result:
    from velox_cache import load_calibration
    from velox_cache.harness.arm_readings import read_arms
    from velox_cache.harness.arms import FULL, cache_maker

    model, tokenizer = load_model(arguments.model)
    calibration = load_calibration(arguments.calibration) if arguments.calibration else None
    tokens = _tokens(arguments, tokenizer, arguments.context + arguments.scored)
    makers = [cache_maker(model, arm, calibration) for arm in (FULL, *arms)]
    found = read_arms(model, tokens, makers, n_context=arguments.context)
    rows = [_reading_row(arm.label, one) for arm, one in zip((FULL, *arms), found, strict=True)]
    return rows, rows


def _curdkv(arguments: argparse.Namespace) -> Result:
    from velox_cache import load_calibration
    from velox_cache.evaluation.curdkv_variants import curdkv_variants

    model, tokenizer = load_model(arguments.model)
    calibration = load_calibration(arguments.calibration) if arguments.calibration else None
    found = curdkv_variants(
        model,
        _tokens(arguments, tokenizer, arguments.context + arguments.scored),
        arguments.budget,
        n_context=arguments.context,
        calibration=calibration,
        by_token=arguments.by_token,
    )
    rows = [_reading_row(label, one) for label, one in found.items()]
    return rows, rows


def _reading_row(label: str, one: "ArmReading") -> dict[str, Any]:
    return {
        "cache": label,
        "rows kept": one.usage.rows_kept,
        "perplexity": one.perplexity,
        "KL to full": one.fidelity.kl_divergence,
        "same next token": one.fidelity.agreement,
    }


def _prefill(arguments: argparse.Namespace) -> Result:
    import mlx.core as mx

    from velox_cache.bench.arms import Shape, method
    from velox_cache.evaluation.prefill import prefill_in_chunks

    settings = {"budget": 512, **method_settings(arguments)}
    shape, tokens = Shape(), 4096
    size = (1, shape.n_kv_heads, tokens, shape.head_dim)
    keys, values = (mx.random.normal(size, key=mx.random.key(i)) for i in (0, 1))
    rows: Records = [
        {"chunk": one.chunk, "calls": one.calls, "same rows as at once": one.same_rows, "ms": 1000 * one.seconds}
        for one in prefill_in_chunks(method(arguments.method, shape, **settings), keys, values, (1024, 256, 64, 16))
    ]
    return rows, rows


def _intervals(arguments: argparse.Namespace) -> Result:
    import numpy as np

    from velox_cache import load_calibration
    from velox_cache.evaluation.intervals import read_at_intervals
    from velox_cache.harness.texts import passages, text_named
    from velox_cache.installation.layer_arguments import calibration_for
    from velox_cache.known_methods import method_named

    model, tokenizer = load_model(arguments.model)
    calibration = load_calibration(arguments.calibration) if arguments.calibration else None
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
        calibration=calibration_for(method_named(arguments.method), calibration),
        share=arguments.share,
    )
    at_once = np.array([one.kl_divergence for one in found if one.interval == 1])
    rows: Records = []
    for interval in dict.fromkeys(one.interval for one in found):
        those = [one for one in found if one.interval == interval]
        more = np.array([one.kl_divergence for one in those]) - at_once
        rows.append(
            {
                "interval": interval,
                "budget": those[0].budget,
                "KL to full": float(np.mean([one.kl_divergence for one in those])),
                "more than at 1": float(more.mean()),
                "worse on": f"{(more > 0).sum()} of {len(those)}" if interval > 1 else "-",
                "perplexity": float(np.exp(np.mean(np.log([one.perplexity for one in those])))),
                "same next token": float(np.mean([one.agreement for one in those])),
            }
        )
    return [vars(one) for one in found], rows


def _memory(arguments: argparse.Namespace) -> Result:
    from mlx_lm.models.cache import make_prompt_cache

    from velox_cache import uninstall
    from velox_cache.harness.memory import memory_use

    model, tokenizer = load_model(arguments.model)
    tokens = _tokens(arguments, tokenizer, arguments.context)
    rows: Records = []
    for name in ("full cache", arguments.method):
        if name == arguments.method:
            install_method(model, arguments)
        used = memory_use(model, lambda: make_prompt_cache(model), tokens, 256)
        uninstall(model)
        rows.append(
            {
                "cache": name,
                "rows kept": used.usage.rows_kept,
                "kept KV MiB": used.usage.kept_bytes / 2**20,
                "held MiB": used.held_bytes / 2**20,
                "MLX peak above the weights, MiB": used.peak_bytes / 2**20,
            }
        )
    return rows, rows


def _synthetic(arguments: argparse.Namespace) -> Result:
    return SYNTHETIC[arguments.subject]()


def _arm(arguments: argparse.Namespace) -> "Arm":
    from velox_cache.harness.arms import Arm

    return Arm(arguments.method, arguments.method, method_settings(arguments), calibrated=bool(arguments.calibration))


def _tokens(arguments: argparse.Namespace, tokenizer: Any, n_tokens: int) -> list[int]:
    from velox_cache.harness.texts import passages, text_named

    return passages(list(tokenizer.encode(text_named(arguments.text))), n_tokens, 1)[0]


def _median(values: Any) -> Any:
    import numpy as np

    return np.median(values)


_KINDS: Mapping[str, tuple[str, bool, bool]] = MappingProxyType(
    {
        "anisotropy": ("whether queries drift along one direction per head", True, False),
        "attention": ("how well scores predict attention, per head", True, False),
        "perplexity": ("perplexity and fidelity of one method against the full cache, token by token", True, True),
        "fidelity": ("the same as perplexity: one reading gives both", True, True),
        "recency": ("how many recent rows to protect, at a budget", True, True),
        "prefill": ("prefill at once against chunks, of the cache alone: kept rows and time", False, True),
        "intervals": ("what eviction at intervals costs in quality, at equal peak rows (--budget)", True, True),
        "memory": ("bytes and peak memory against the full cache", True, True),
        "curdkv": ("CurDKV's variants next to Q-Filters and H2O: true queries or keys, blocks or tokens", True, False),
        "synthetic": ("made-up keys of known geometry; needs no model", False, False),
    }
)
"""Summary, whether it takes a model, whether it takes a method."""
_RUN: Mapping[str, Callable[[argparse.Namespace], Result]] = MappingProxyType(
    {
        "anisotropy": _anisotropy,
        "attention": _attention,
        "perplexity": _reading,
        "fidelity": _reading,
        "recency": _recency,
        "prefill": _prefill,
        "intervals": _intervals,
        "memory": _memory,
        "curdkv": _curdkv,
        "synthetic": _synthetic,
    }
)

"""Run one measurement by itself. `velox compare` runs most of them together, for many methods and budgets."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from velox_cache.cli import eval_costs, eval_queries, eval_readings
from velox_cache.cli.calibration_argument import add_calibration_argument
from velox_cache.cli.eval_synthetic import SYNTHETIC, Result
from velox_cache.cli.method_arguments import METHOD_EXAMPLES, add_method_arguments
from velox_cache.cli.model_argument import add_model_argument
from velox_cache.distributed.launcher import launched_rank

EXAMPLES = f"""examples:
  velox eval anisotropy smollm2-135m
  velox eval attention smollm2-135m --calibration calibration.npz
  velox eval score-fits smollm2-135m --max-tokens 3072
  velox eval perplexity smollm2-135m --method qfilters --budget 256 --calibration calibration.npz
  velox eval recency smollm2-135m --method qfilters --budget 128 --calibration calibration.npz
  velox eval stalled-offset smollm2-135m --method qfilters --budget 256 --calibration calibration.npz
  velox eval prefill --method qfilters --budget 512
  velox eval prefill-at-intervals smollm2-135m --method l2norm --budget 512
  velox eval intervals smollm2-135m --method fusion --budget 512 --context 1024 --calibration calibration.npz
  velox eval agent-session smollm2-135m --method l2norm --budget 384 --set interval=128
  velox eval quantised smollm2-135m --method l2norm --context 1024
  velox eval memory smollm2-135m --method streaming_llm --budget 512 --kv-bits 4 --steps 32
  velox eval synthetic qfilters
  velox eval synthetic curdkv
  velox eval synthetic solver
  velox eval synthetic bias
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
        if name in ("intervals", "quantised"):
            kind.add_argument("--passages", type=int, default=4, metavar="N", help="of the text (default: 4)")
        if name == "intervals":
            kind.add_argument(
                "--share", type=float, metavar="X", help="recent part of the budget (default: that of install)"
            )
        if name in ("perplexity", "fidelity", "recency", "curdkv", "intervals", "quantised", "stalled-offset"):
            kind.add_argument("--scored", type=int, default=96, metavar="N", help="tokens predicted (default: 96)")
        if name == "prefill-at-intervals":
            kind.set_defaults(context=2048)
            kind.add_argument("--rounds", type=int, default=4, metavar="N", help="turns of each cache (default: 4)")
        if name in ("perplexity", "fidelity", "recency"):
            kind.add_argument(
                "--block", type=int, default=0, metavar="N", help="tokens of a block of the context (default: all)"
            )
        if name == "agent-session":
            kind.set_defaults(context=2000)
            kind.add_argument("--turns", type=int, default=10, metavar="N", help="replies (default: 10)")
            kind.add_argument("--reply", type=int, default=48, metavar="N", help="tokens of each (default: 48)")
            kind.add_argument("--snapshots", type=int, default=1, metavar="N", help="as for `velox serve` (default: 1)")
        if name == "attention":
            add_calibration_argument(kind, "what `velox calibrate` made", required=True)
        if name == "score-fits":
            add_model_argument(kind)
            kind.add_argument(
                "--max-tokens", type=int, default=3072, metavar="N", help="of the calibration text (default: 3072)"
            )
        if name in _SAVED:
            kind.add_argument("folder", help=f"with {_SAVED[name]} files, as `velox eval` with --json writes them")
        if name == "memory":
            kind.add_argument(
                "--steps", type=int, default=0, metavar="N", help="last tokens, read one by one (default: none)"
            )
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


def _synthetic(arguments: argparse.Namespace) -> Result:
    return SYNTHETIC[arguments.subject]()


_KINDS: Mapping[str, tuple[str, bool, bool]] = MappingProxyType(
    {
        "anisotropy": ("whether queries drift along one direction per head", True, False),
        "attention": ("how well scores predict attention, per head", True, False),
        "score-fits": ("how well a row's worth is told, by the learned score's features and ridge", False, False),
        "perplexity": ("perplexity and fidelity of one method against the full cache, token by token", True, True),
        "fidelity": ("the same as perplexity: one reading gives both", True, True),
        "recency": ("how many recent rows to protect, at a budget", True, True),
        "stalled-offset": ("what it costs when positions stop at the budget, an ablation", True, True),
        "prefill": ("prefill at once against chunks, of the cache alone: kept rows and time", False, True),
        "prefill-at-intervals": ("a prompt read by the model, whose calls are taken apart, in turns", True, True),
        "intervals": ("what eviction at intervals costs in quality, at equal peak rows (--budget)", True, True),
        "saved-intervals": ("the means of saved `velox eval intervals`, over all texts of each method", False, False),
        "agent-session": (
            "how much of an agent's prompts the server's store spares, replies cold and warm",
            True,
            True,
        ),
        "quantised": ("rows of several widths, at equal bytes", True, True),
        "saved-quantised": ("the means of saved `velox eval quantised`, over all texts", False, False),
        "memory": ("bytes and peak memory against the full cache", True, True),
        "curdkv": ("CurDKV's variants next to Q-Filters and H2O: true queries or keys, blocks or tokens", True, False),
        "synthetic": ("made-up keys of known geometry; needs no model", False, False),
    }
)
"""Summary, whether it takes a model, whether it takes a method."""
_SAVED: Mapping[str, str] = MappingProxyType({"saved-intervals": "METHOD-TEXT.json", "saved-quantised": "TEXT.json"})
"""What the folder holds, of the measurements that read one."""
_RUN: Mapping[str, Callable[[argparse.Namespace], Result]] = MappingProxyType(
    {
        "anisotropy": eval_queries.anisotropy,
        "attention": eval_queries.attention,
        "score-fits": eval_queries.score_fits,
        "perplexity": eval_readings.reading,
        "fidelity": eval_readings.reading,
        "recency": eval_readings.recency,
        "stalled-offset": eval_readings.stalled_offset,
        "prefill": eval_costs.prefill,
        "prefill-at-intervals": eval_costs.prefill_at_intervals,
        "intervals": eval_readings.intervals,
        "saved-intervals": eval_readings.saved_intervals,
        "agent-session": eval_costs.agent_session,
        "quantised": eval_readings.quantised,
        "saved-quantised": eval_readings.saved_quantised,
        "memory": eval_costs.memory,
        "curdkv": eval_readings.curdkv,
        "synthetic": _synthetic,
    }
)

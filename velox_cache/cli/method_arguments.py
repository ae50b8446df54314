"""The options that choose an eviction method and its settings, the same for every command.

Nothing here knows a method: names and settings are checked by the registry when the command runs, so a method that is
registered is offered everywhere.
"""

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from velox_cache.cli.calibration_argument import add_calibration_argument
from velox_cache.recommended import AUTO, RECOMMENDED_METHOD

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from velox_cache.calibration.artifact import Calibration
    from velox_cache.installation.report import InstallReport

FULL_CACHE = "full"

METHOD_EXAMPLES = """settings:
  --budget, --recent and --n-sink are what most methods have; any other goes with --set, as in
  --set sign=-1 --set calib_tokens=256. `velox methods` lists them all."""


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a method and its settings, of how layers share the rows, of the calibration and of its queries."""
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--method",
        default=RECOMMENDED_METHOD,
        metavar="NAME",
        help=f"see `velox methods`; {FULL_CACHE!r} is the model's own cache (default: {RECOMMENDED_METHOD})",
    )
    group.add_argument(
        "--budget", type=_budget, metavar="N", help="most rows kept per head, all included (default: 512)"
    )
    group.add_argument(
        "--layer-shares",
        metavar="RULE",
        default=AUTO,
        help="how rows are shared out, --budget on average: calibrated (each head as many as lose least), "
        "calibrated-layers (each layer), pyramid (fewer with depth), squeeze (fewer where a layer changes little) or "
        f"alike; default: calibrated where the calibration knows how, else alike ({AUTO})",
    )
    group.add_argument(
        "--recent",
        type=int,
        metavar="R",
        help="latest rows that always stay (default: a share of the budget, 3/4 with most methods)",
    )
    group.add_argument("--n-sink", type=int, metavar="N", help="first rows that always stay (default: 4)")
    group.add_argument(
        "--pinned",
        type=_range,
        action="append",
        metavar="START:STOP",
        help="positions that always stay, such as 0:120 for a system prompt; may be given several times",
    )
    group.add_argument(
        "--kv-bits",
        type=int,
        metavar="B",
        help="bits of stored keys and values: 2, 3, 4, 5, 6 or 8",
    )
    group.add_argument("--key-bits", type=int, metavar="B", help="the same for keys alone")
    group.add_argument("--value-bits", type=int, metavar="B", help="and for values alone")
    group.add_argument(
        "--kv-group-size",
        type=int,
        metavar="G",
        help="numbers that share a scale: 32, 64, 128 (default: 64)",
    )
    group.add_argument(
        "--codebooks",
        type=int,
        metavar="B",
        help="store rows by codebooks that `velox calibrate --codebooks B` made: 1, 2 or 4 bits a number",
    )
    group.add_argument(
        "--set",
        dest="settings",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting of the method; may be given several times",
    )
    add_calibration_argument(
        group, "what `velox calibrate` made (default: that of these weights, made once where there is none)"
    )
    group.add_argument(
        "--no-calibrate",
        action="store_true",
        help="look for no calibration and make none: Q-Filters then guesses from the first keys of each text",
    )
    group.add_argument(
        "--queries",
        choices=("true", "proxy"),
        default="true",
        help="for methods that score by attention: the model's own queries, or keys in their place (default: true)",
    )


def method_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by name: what `velox_cache.install` takes as keywords."""
    names = ("budget", "recent", "n_sink", "pinned", "key_bits", "value_bits", "codebooks")
    common = {name: getattr(arguments, name) for name in names}
    common["group_size"] = arguments.kv_group_size
    given = {name: value for name, value in common.items() if value is not None}
    if arguments.kv_bits is not None:
        twice = [name for name in ("key_bits", "value_bits") if name in given]
        if twice:
            raise ValueError("--kv-bits is --key-bits and --value-bits in one; give it, or one or both of them")
        given |= dict.fromkeys(("key_bits", "value_bits"), arguments.kv_bits)
    for name, value in arguments.settings:
        if name in given:
            raise ValueError(f"the setting {name!r} is given twice")
        given[name] = value
    return given


def check_method_arguments(arguments: argparse.Namespace, *, share: bool = False) -> None:
    """ValueError for options that cannot work, before a model is loaded. share: a budget may be one of the prompt."""
    from velox_cache.calibration.default_recent import RECENT_SHARE, with_default_recent
    from velox_cache.installation.asked import check_budget, check_settings
    from velox_cache.installation.shares import check_shares
    from velox_cache.known_methods import method_named

    settings = method_settings(arguments)
    if arguments.method == FULL_CACHE:
        if settings or arguments.calibration or arguments.layer_shares != AUTO:
            raise ValueError(f"--method {FULL_CACHE} keeps every row: it takes no settings and no calibration")
        return
    check_shares(_shares(arguments), None)
    method = method_named(arguments.method)
    if isinstance(settings.get("budget"), float):
        if not share:
            check_budget(settings["budget"])
        del settings["budget"]  # rows are counted when the prompt is known
        settings.pop("recent", None)
    calibrated = bool(arguments.calibration)
    check_settings(method, with_default_recent(method, settings, RECENT_SHARE), calibrated=calibrated)
    if arguments.calibration:
        stored_calibration(arguments, None)


def stored_calibration(arguments: argparse.Namespace, name: str | None) -> "Calibration | None":
    """The calibration in the file that is named, if one is.

    `name` is that of the model, None where it is not known. A file that knows its weights is compared by them when it
    is installed, others by their name; with --model-id, the name that it gives decides. Raises ValueError for another.
    """
    from velox_cache import load_calibration

    if not arguments.calibration:
        return None
    asked = getattr(arguments, "model_id", None)
    calibration = load_calibration(arguments.calibration, expect_model_id=asked)
    if asked is not None:
        return replace(calibration, weights=None)
    if calibration.weights is None and name is not None and calibration.model_id not in (None, name):
        raise ValueError(
            f"{arguments.calibration} was calibrated for model {calibration.model_id!r}, not {name!r}; leave it out to "
            f"have one found or made, or say --model-id {calibration.model_id} if the two names mean the same weights"
        )
    return calibration


def install_method(
    model: "nn.Module",
    arguments: argparse.Namespace,
    *,
    tokenizer: "TokenizerWrapper | None" = None,
    name: str | None = None,
    n_prompt: int | None = None,
    snapshots: int = 0,
) -> "InstallReport | None":
    """Give `model` the caches that the options ask for; what was done, or None for the full cache.

    name: the model's, for calibrations that do not know their weights. n_prompt: tokens that a share is of. Raises
    ValueError as `velox_cache.install` and `stored_calibration` do.
    """
    from velox_cache import install, uninstall

    settings = method_settings(arguments)
    if arguments.method == FULL_CACHE:
        uninstall(model)
        return None
    if n_prompt is not None:
        from velox_cache.generation import rows_of

        settings["budget"] = rows_of(settings.get("budget"), n_prompt)
    return install(
        model,
        arguments.method,
        calibration=stored_calibration(arguments, name),
        calibrate=False if arguments.no_calibrate else "auto",
        tokenizer=tokenizer,
        queries=arguments.queries,
        snapshots=snapshots,
        shares=_shares(arguments),
        **settings,
    )


def _shares(arguments: argparse.Namespace) -> str | None:
    shares: str = arguments.layer_shares
    return None if shares == "alike" else shares


def _budget(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows, such as 512") from None


def _range(text: str) -> tuple[int, int]:
    start, colon, stop = text.partition(":")
    if not colon or not start.isdecimal() or not stop.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form START:STOP, such as 0:120")
    return int(start), int(stop)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name.replace("-", "_"), _value(value)


def _value(text: str) -> Any:
    in_python = {"True": True, "False": False, "None": None}  # as `velox methods` shows defaults
    if text in in_python:
        return in_python[text]
    try:
        return json.loads(text)
    except ValueError:
        return text  # a word, such as granularity=token

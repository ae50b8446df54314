"""The options that choose an eviction method and its settings, the same for every command.

Nothing here knows a method: names and settings are checked by the registry when the command runs, so a method that is
registered is offered everywhere.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from velox_cache.cli.calibration_argument import add_calibration_argument

if TYPE_CHECKING:
    import mlx.nn as nn

    from velox_cache.installation.installing import InstallReport

FULL_CACHE = "full"

METHOD_EXAMPLES = """settings:
  --budget, --recent and --n-sink are what most methods have; any other goes with --set, as in
  --set sign=-1 --set calib_tokens=256. `velox methods` lists them all."""


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """--method, --budget, --recent, --n-sink, --set, --calibration, --queries."""
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--method",
        default="qfilters",
        metavar="NAME",
        help=f"see `velox methods`; {FULL_CACHE!r} is the model's own cache (default: qfilters)",
    )
    group.add_argument("--budget", type=int, metavar="N", help="most rows kept per head, all included (default: 512)")
    group.add_argument(
        "--recent", type=int, metavar="R", help="latest rows that always stay (default: 3/4 of the budget)"
    )
    group.add_argument("--n-sink", type=int, metavar="N", help="first rows that always stay (default: 4)")
    group.add_argument(
        "--set",
        dest="settings",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting of the method; may be given several times",
    )
    add_calibration_argument(group, "what `velox calibrate` made, for methods that use it")
    group.add_argument(
        "--queries",
        choices=("true", "proxy"),
        default="true",
        help="for methods that score by attention: the model's own queries, or keys in their place (default: true)",
    )


def method_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by name: what `velox_cache.install` takes as keywords."""
    common = {name: getattr(arguments, name) for name in ("budget", "recent", "n_sink")}
    given = {name: value for name, value in common.items() if value is not None}
    for name, value in arguments.settings:
        if name in given:
            raise ValueError(f"the setting {name!r} is given twice")
        given[name] = value
    return given


def install_method(
    model: "nn.Module", arguments: argparse.Namespace, model_id: str | None = None
) -> "InstallReport | None":
    """Give `model` the caches that the options ask for; what was done, or None for the full cache.

    `model_id` is the name that the calibration must bear. Raises ValueError as `velox_cache.install` and
    `velox_cache.load_calibration` do, and when settings are given for the full cache.
    """
    from velox_cache import install, load_calibration, uninstall
    from velox_cache.known_methods import method_named

    settings = method_settings(arguments)
    if arguments.method == FULL_CACHE:
        if settings or arguments.calibration:
            raise ValueError(f"--method {FULL_CACHE} keeps every row: it takes no settings and no calibration")
        uninstall(model)
        return None
    calibration = load_calibration(arguments.calibration, expect_model_id=model_id) if arguments.calibration else None
    report = install(model, arguments.method, calibration=calibration, queries=arguments.queries, **settings)
    if calibration is None and "filters" in method_named(arguments.method).calibrated:
        print(
            "note: without --calibration, a worse stand-in is used; `velox calibrate` makes a calibration",
            file=sys.stderr,
        )
    return report


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

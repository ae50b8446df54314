"""`velox fetch-model`."""

import argparse
import sys
from typing import get_args

from velox_cache.models.fetch import default_cache_dir, default_precision, fetch_model
from velox_cache.models.sources import SOURCES, Precision


def add_fetch_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `velox fetch-model`."""
    known = "; ".join(f"{name}: {source.about}" for name, source in SOURCES.items())
    parser.add_argument("name", metavar="NAME", help=known)
    parser.add_argument("--cache-dir", metavar="DIR", help=f"where model folders live (default: {default_cache_dir()})")
    parser.add_argument(
        "--precision", choices=get_args(Precision), help=f"of the weights (default here: {default_precision()})"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run_fetch_model(arguments: argparse.Namespace) -> int:
    """Fetch, and print the folder on standard output; 1 with the reason on standard error when that fails."""
    try:
        folder = fetch_model(
            arguments.name, arguments.cache_dir, progress=not arguments.quiet, precision=arguments.precision
        )
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        print(f"velox fetch-model: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0

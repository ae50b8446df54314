"""The `velox` command: picks the subcommand, shows its help, turns errors into one line.

A subcommand is a module of this package, named as in COMMANDS with `_` for `-`. Its docstring is the text of its help.
It has `add_arguments(parser)` and `run(arguments)`, which returns the exit status, and may have EXAMPLES, shown below
the options. Only the chosen one is imported, and it imports mlx inside `run` only, so that help comes at once.

Under mlx.launch every rank runs the command and rank 0 alone prints, except for errors, which each rank tells.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from velox_cache.distributed.launcher import launched_rank

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "demo": "start here: fetch a small model, calibrate it, compare caches side by side",
        "generate": "generate text inside a bounded cache",
        "compress": "read a text once, keep what repeating it needs most, and write the prompt cache to a file",
        "advise": "say which budget fits a model, a memory and a context",
        "serve": "run mlx_lm's OpenAI-compatible server with bounded caches",
        "calibrate": "calibrate a model on any text: directions and statistics for each KV head",
        "inspect": "say what is in a calibration",
        "inspect-model": "say, layer by layer, what an evicting cache would do with a model",
        "compare": "measure eviction methods on a model: perplexity, tasks, attention, what is kept",
        "eval": "run one measurement by itself",
        "methods": "list the eviction methods and their settings",
        "fetch-model": "fetch a small real model, without a model hub",
        "bench": "time the caches beside mlx_lm's own",
        "doctor": "check this installation",
    }
)
EXAMPLES = """examples:
  velox demo
  velox fetch-model smollm2-135m
  velox advise smollm2-135m --memory 1GB --context 32000
  velox generate smollm2-135m --budget 512 --prompt "Why is the sky blue?"

`velox COMMAND --help` explains each."""
REFUSED = 2  # argparse's own status for arguments that cannot be used


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Errors that a user can act on are one line on stderr and status 2."""
    given = sys.argv[1:] if argv is None else list(argv)
    rank = launched_rank() or 0
    if rank == 0:
        return _run(given, "", sys.stderr)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return _run(given, f" (rank {rank})", sys.__stderr__ or nowhere)


def _run(given: Sequence[str], rank: str, errors: TextIO) -> int:
    parser = argument_parser(next((word for word in given if word in COMMANDS), None))
    arguments = parser.parse_args(given)
    if arguments.version:
        from velox_cache import __version__

        print(f"velox {__version__}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if arguments.traceback:
            raise
        print(f"velox {arguments.command}{rank}: {_one_line(error)}", file=errors)
        return REFUSED
    except KeyboardInterrupt:
        print(f"velox {arguments.command}{rank}: interrupted", file=errors)
        return 130
    return status


def argument_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser that lists all commands and knows the options of one."""
    parser = argparse.ArgumentParser(
        prog="velox",
        description="KV-cache eviction for MLX language models: bounded memory, true positions.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    parser.add_argument("--version", action="store_true", help="say the version of velox-kv")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(f"velox_cache.cli.{name.replace('-', '_')}")
        subparser = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def _one_line(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"no file or folder {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__

"""Run mlx_lm's OpenAI-compatible server with bounded caches.

It is mlx_lm's own server: batched and sequential requests, streaming, chat templates, prompt-cache reuse. Its own
options come last, after --server-options."""

import argparse
from typing import TYPE_CHECKING

from velox_cache.cli.method_arguments import (
    METHOD_EXAMPLES,
    add_method_arguments,
    check_method_arguments,
    install_method,
    method_settings,
)
from velox_cache.cli.model_argument import add_model_argument, model_folder

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

EXAMPLES = f"""{METHOD_EXAMPLES}

examples:
  velox serve smollm2-135m --budget 512
  velox serve mlx-community/Qwen3-4B-4bit --budget 2048 --port 8000 --server-options --temp 0.7"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the cache's options, --host, --port, and mlx_lm.server's options."""
    add_model_argument(parser)
    add_method_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    parser.add_argument(
        "--pin-system",
        action="store_true",
        help="keep all of a chat up to the end of its system message; it counts in the budget, which it must fit",
    )
    parser.add_argument(
        "--snapshots",
        type=int,
        default=1,
        metavar="N",
        help="with --set interval=: boundaries that a stored cache can be taken back beyond, for prompts that go on "
        "from before the last reply (default: 1)",
    )
    parser.add_argument(
        "--server-options",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="all that follows goes to mlx_lm.server: --temp 0.7 --prompt-cache-bytes 4GB; see mlx_lm.server --help",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    check_method_arguments(arguments)

    from velox_cache.serve import serve

    folder = model_folder(arguments.model)
    settings = method_settings(arguments)
    snapshots = arguments.snapshots if settings.get("interval", 1) > 1 else 0
    if settings.get("rollback"):
        raise ValueError(
            f"rollback={settings['rollback']} is for speculative decoding, which the server does not offer"
        )
    options = ["--host", arguments.host, "--port", str(arguments.port), *arguments.server_options]

    def bound(model: "nn.Module", tokenizer: "TokenizerWrapper") -> object:
        report = install_method(model, arguments, tokenizer=tokenizer, snapshots=snapshots)
        return report or "the model's own caches, unbounded"

    serve(arguments.model if folder is None else str(folder), bound, options, pin_system=arguments.pin_system)
    return 0

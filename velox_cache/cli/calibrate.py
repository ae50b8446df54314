"""Make the Q-Filters of a model: run text through it, gather its queries, keep one direction per KV head and layer.

A few thousand tokens of any text near to what the model will read are enough. Filters belong to one model.

Under mlx.launch the ranks share out the text, each with the whole model; with --shard they share out the model.
"""

import argparse
import sys
from pathlib import Path

from velox_cache.cli.model_argument import (
    add_model_argument,
    add_model_id_argument,
    add_shard_argument,
    load_model,
    model_id,
)
from velox_cache.cli.stdin import text_from_stdin
from velox_cache.ranks import launched_rank

EXAMPLES = """examples:
  velox calibrate smollm2-135m -o filters.npz
  velox calibrate MODEL -o filters.npz --text novel.txt manual.txt --max-tokens 40000
  mlx.launch --hostfile hosts.json -- velox calibrate MODEL -o filters.npz"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox calibrate`."""
    add_model_argument(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where the filters go, an .npz file")
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 text files; - is stdin (default: Python's own documentation)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=3072, metavar="N", help="tokens to run, of all texts together (default: 3072)"
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        default=2048,
        metavar="N",
        help="texts are cut into sequences of N tokens (default: 2048)",
    )
    add_model_id_argument(parser)
    add_shard_argument(parser, None, "the whole model, and a part of the text")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, save, describe."""
    output = Path(arguments.output).expanduser()
    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder {output.parent} for {output.name} does not exist; make it first")

    from velox_cache import calibrate, save_qfilters
    from velox_cache.cli.inspect import describe
    from velox_cache.distributed import world
    from velox_cache.embedded_text import SOURCE, calibration_texts

    texts = [_read(name) for name in arguments.text] if arguments.text else calibration_texts()
    model, tokenizer = load_model(arguments.model, arguments.shard)
    calibration = calibrate(
        model,
        tokenizer,
        texts,
        max_tokens=arguments.max_tokens,
        sequence_length=arguments.sequence_length,
        model_id=arguments.model_id or model_id(arguments.model),
        dataset=", ".join(arguments.text) if arguments.text else SOURCE,
        progress=sys.stderr.isatty(),
        group=world(),
    )
    if not launched_rank():
        save_qfilters(calibration, output)
    print(f"{output}: {describe(calibration)}")
    return 0


def _read(name: str) -> str:
    if name == "-":
        return text_from_stdin("--text -")
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error

"""Calibrate a model: run text through it and gather, for each KV head, what calibrated methods take.

A few thousand tokens of any text near to what the model will read are enough. The file holds the filters
of qfilters and the statistics of keydiff, expected_attention, fusion, learned and triattention. It belongs to one
model.

Under mlx.launch the ranks share out the text, each with the whole model; with --shard they share out the model.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from velox_cache.cli.model_argument import (
    add_model_argument,
    add_model_id_argument,
    add_shard_argument,
    load_model,
    model_id,
)
from velox_cache.cli.stdin import text_from_stdin
from velox_cache.distributed.launcher import launched_rank
from velox_cache.file_checks import check_folder_of, file_text

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from velox_cache.calibration.artifact import Calibration

EXAMPLES = """examples:
  velox calibrate smollm2-135m
  velox calibrate MODEL -o calibration.npz --text novel.txt manual.txt --max-tokens 40000
  velox calibrate smollm2-135m -o calibration.npz --search-weights 600
  mlx.launch --hostfile hosts.json -- velox calibrate MODEL -o calibration.npz"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox calibrate`."""
    add_model_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="an .npz file (default: in the cache folder, where every command finds it)",
    )
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
    parser.add_argument(
        "--no-learned", action="store_true", help="leave out the fit of the method learned, and its time"
    )
    parser.add_argument(
        "--losses",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure what each KV head loses at shares of its rows, through its output projection, on up to three "
        "passages with a far copy each: by this heads share the rows (384 tokens at least; default: yes)",
    )
    parser.add_argument(
        "--codebooks",
        type=int,
        choices=(1, 2, 4),
        metavar="B",
        help="make codebooks too, for rows stored in 1, 2 or 4 bits a number (--codebooks of the other commands)",
    )
    parser.add_argument(
        "--search-weights",
        type=float,
        metavar="SECONDS",
        help="then search for weights of the method fusion for so long; goes on with an interrupted search",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of that search (default: 0)")
    add_model_id_argument(parser)
    add_shard_argument(parser, None, "the whole model, and a part of the text")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, save, describe."""
    output = None if arguments.output is None else Path(arguments.output).expanduser()
    if output is not None:
        check_folder_of(output)

    if arguments.search_weights is not None and launched_rank() is not None:
        raise ValueError("--search-weights runs in one process; calibrate under mlx.launch, then search without it")

    from velox_cache import calibrate, save_calibration
    from velox_cache.calibration.made_once import calibration_file
    from velox_cache.calibration.predicted_attention import predicts_attention
    from velox_cache.calibration.texts import SOURCE, calibration_texts
    from velox_cache.cli.inspect import describe
    from velox_cache.distributed.collectives import world

    texts = [_read(name) for name in arguments.text] if arguments.text else calibration_texts()
    model, tokenizer = load_model(arguments.model, arguments.shard)
    if output is None:
        output = calibration_file(model)
        output.parent.mkdir(parents=True, exist_ok=True)
    calibration = calibrate(
        model,
        tokenizer,
        texts,
        max_tokens=arguments.max_tokens,
        sequence_length=arguments.sequence_length,
        model_id=arguments.model_id or model_id(arguments.model),
        dataset=", ".join(arguments.text) if arguments.text else SOURCE,
        group=world(),
        learned=not arguments.no_learned,
        losses=arguments.losses,
        codebooks=arguments.codebooks,
    )
    if launched_rank() is None:
        calibration = replace(calibration, predicts=predicts_attention(model, tokenizer, calibration))
    if not launched_rank() and (arguments.search_weights is None or not output.exists()):
        save_calibration(calibration, output)  # an older file may hold searched weights: not before the search is over
    if arguments.search_weights is not None:
        calibration = _searched(model, tokenizer, calibration, texts, arguments, output)
    print(f"{output}: {describe(calibration)}")
    return 0


def _searched(
    model: "nn.Module",
    tokenizer: "TokenizerWrapper",
    calibration: "Calibration",
    texts: Sequence[str],
    arguments: argparse.Namespace,
    output: Path,
) -> "Calibration":
    """The calibration with what a search found, saved; how the search went is printed, and stays beside the output."""
    from velox_cache import save_calibration
    from velox_cache.cli.progress import search_progress
    from velox_cache.learning.weight_search import search_weights

    state_file = output.with_name(f"{output.name}.search.json")
    with search_progress(arguments.search_weights) as advance:
        outcome = search_weights(
            model,
            tokenizer,
            calibration,
            texts,
            seconds=arguments.search_weights,
            seed=arguments.seed,
            state_file=state_file,
            advance=advance,
        )
    save_calibration(outcome.calibration, output)
    print(f"{state_file}: {outcome}")
    return outcome.calibration


def _read(name: str) -> str:
    if name == "-":
        return text_from_stdin("--text -")
    return file_text(name)

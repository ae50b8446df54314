"""The MODEL argument: a folder, a fetched model's short name, or a repository that mlx_lm can load."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def add_model_argument(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """MODEL, None when it is left out and not `required`."""
    parser.add_argument(
        "model",
        nargs=None if required else "?",
        metavar="MODEL",
        help="a model folder, the short name of a fetched model (velox fetch-model), or a Hugging Face repository "
        "that mlx_lm can load, such as mlx-community/Llama-3.2-3B-Instruct-4bit",
    )


def add_model_id_argument(parser: argparse.ArgumentParser) -> None:
    """--model-id."""
    parser.add_argument(
        "--model-id",
        metavar="ID",
        help="the name under which a calibration knows MODEL (default: MODEL's own name, without its folder)",
    )


def add_shard_argument(parser: argparse.ArgumentParser, default: str | None, otherwise: str) -> None:
    """--shard. `otherwise` says what happens without it."""
    parser.add_argument(
        "--shard",
        choices=("heads", "layers"),
        default=default,
        help="under mlx.launch: what of the model each rank holds, a part of every layer's heads (tensor parallel) or "
        f"some of the layers (pipeline parallel) (default: {otherwise})",
    )


def model_id(model: str) -> str:
    """The name under which a calibration knows a model: its repository, or the last part of its folder."""
    folder = model_folder(model)
    return model if folder is None else folder.resolve().name


def model_folder(model: str) -> Path | None:
    """The folder that MODEL stands for, if it is on this machine.

    Raises FileNotFoundError when MODEL can only be a folder and is not there, and ValueError when it is the short name
    of a model that has not been fetched yet.
    """
    from velox_cache.models import SOURCES, default_cache_dir, default_precision

    fetched = default_cache_dir()
    for folder in (Path(model).expanduser(), fetched / f"{model}-{default_precision()}", fetched / model):
        if folder.is_dir():
            if not (folder / "config.json").exists():
                raise FileNotFoundError(f"{folder} is no model folder: it has no config.json")
            return folder
    if model in SOURCES:
        raise ValueError(f"{model} is not on this machine yet: run `velox fetch-model {model}`")
    if model.count("/") != 1 or model.startswith((".", "~", "/")):
        raise FileNotFoundError(
            f"no model folder {model!r}; give a folder, a repository (owner/name), or one of {', '.join(SOURCES)} "
            "after fetching it with `velox fetch-model`"
        )
    return None


def load_model(model: str, shard: str | None = None) -> "tuple[nn.Module, TokenizerWrapper]":
    """Load MODEL with mlx_lm; of several ranks each its part, "heads" or "layers", where `shard` says so.

    Raises as `model_folder` does, and ValueError when the hub cannot give it or it cannot be sharded that way.
    """
    from velox_cache.distributed.collectives import world

    group = None if shard is None else world()
    # The tokenizer warns of texts longer than the model's context. Ours are read in pieces.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = model_folder(model)
    if folder is not None:
        return _loaded(str(folder), shard, group)
    try:
        return _loaded(model, shard, group)
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{model!r} is no folder here, and the Hugging Face hub did not give it: {reason}") from error


def _loaded(name: str, shard: str | None, group: "mx.distributed.Group | None") -> "tuple[nn.Module, TokenizerWrapper]":
    from mlx_lm.utils import load, sharded_load

    if group is None:
        return load(name)
    return sharded_load(name, group if shard == "layers" else None, group if shard == "heads" else None)

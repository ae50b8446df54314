"""--prompt-cache: go on from caches that were filled before, as `velox compress` leaves them in a file."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.nn as nn

MODEL_LABEL = "model"


def add_prompt_cache_argument(parser: argparse.ArgumentParser) -> None:
    """--prompt-cache."""
    parser.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="what `velox compress` made of a text that the prompt is about; it brings its own method and budget",
    )


def stored_caches(file: str, model: "nn.Module", name: str) -> list[Any]:
    """The caches in `file`, made for the model of this name. Raises ValueError for another one's."""
    from velox_cache import load_prompt_cache
    from velox_cache.introspection.plan import plain_caches

    caches, about = load_prompt_cache(file, return_metadata=True)
    made_for = about.get(MODEL_LABEL, name)
    if made_for != name or len(caches) != len(plain_caches(model)):
        raise ValueError(f"{file} holds a prompt cache of {made_for}, not of {name}; compress the text with this model")
    return caches

"""--prompt-cache: go on from caches that were filled before, as `velox compress` leaves them in a file."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.nn as nn

MODEL_LABEL, WEIGHTS_LABEL = "model", "weights"


def add_prompt_cache_argument(parser: argparse.ArgumentParser) -> None:
    """--prompt-cache."""
    parser.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="what `velox compress` made of a text that the prompt is about; it brings its own method and budget",
    )


def stored_caches(file: str, model: "nn.Module", name: str) -> list[Any]:
    """The caches in `file`, made with the weights of `model`, which has this name. Raises ValueError for others.

    A file that does not know its weights is compared by name.
    """
    from velox_cache import load_prompt_cache
    from velox_cache.introspection.plan import plain_caches
    from velox_cache.introspection.weights_digest import weights_digest

    caches, about = load_prompt_cache(file, return_metadata=True)
    made_for, weights = about.get(MODEL_LABEL, name), about.get(WEIGHTS_LABEL)
    own = weights and weights_digest(model)
    if own and own != weights:
        raise ValueError(
            f"{file} holds a prompt cache of {made_for} with other weights than those of {name}, which would read its "
            "rows as something else; compress the text with this model"
        )
    if (not own and made_for != name) or len(caches) != len(plain_caches(model)):
        raise ValueError(f"{file} holds a prompt cache of {made_for}, not of {name}; compress the text with this model")
    return caches

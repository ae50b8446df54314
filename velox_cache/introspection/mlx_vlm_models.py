"""Models of mlx_vlm: which part of one takes caches, and what its calls do not allow."""

import mlx.nn as nn


def is_of_mlx_vlm(model: nn.Module) -> bool:
    return type(model).__module__.split(".")[0] == "mlx_vlm"


def check_takes_caches(model: nn.Module) -> None:
    """ValueError for a whole model of mlx_vlm, which asks its language model for caches, never itself."""
    if is_of_mlx_vlm(model) and isinstance(model.get("language_model"), nn.Module):
        raise ValueError(
            f"{type(model).__module__}.{type(model).__name__} is a model of images and text, whose caches mlx_vlm asks "
            "of its language model: give model.language_model"
        )


def check_can_be_called_in_parts(model: nn.Module) -> None:
    """ValueError for a model of mlx_vlm, whose calls bring arrays that cannot be cut with the tokens."""
    if is_of_mlx_vlm(model):
        raise ValueError(
            "interval needs calls of the model taken apart at its boundaries, and those of mlx_vlm bring positions and "
            "features of images that cannot be cut with the tokens; leave interval=1"
        )

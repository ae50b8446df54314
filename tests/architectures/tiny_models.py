"""The architectures that the laws run over, and one tiny model of each for all of them.

What cannot run here is stated with what mlx_lm answers, and a test sees it answer so: when it no longer does, the
architecture joins the others.
"""

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from velox_cache.architectures.tiny import architectures, tiny_model

ARCHITECTURES = architectures()

_NEEDS_METAL = "No Metal back-end"  # its projections or norms are Metal kernels, without another form

# The models are made, and planned for; their forward pass fails with a plain cache too.
CANNOT_RUN = {"olmo": "inplace addition on an mlx.core.array and str"} | (
    {} if mx.metal.is_available() else {"bitnet": _NEEDS_METAL, "muse_spark": _NEEDS_METAL}
)
RUNNING = tuple(name for name in ARCHITECTURES if name not in CANNOT_RUN)


@cache
def model_of(architecture: str) -> nn.Module:
    """The shared model of an architecture. Who installs on it uninstalls again."""
    return tiny_model(architecture)

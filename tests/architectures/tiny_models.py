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

# What mlx_lm's batch generator answers for plain caches: no mask of theirs fits, or a cache has no batched form.
CANNOT_BATCH = {
    "gemma2": "cannot be broadcast",
    "gpt_bigcode": "Only length-1 arrays",
    "llama4": "does not yet support batching",
}
# Their recurrent state, their memory of the last tokens, or the layers that read another's rows, take in the padding of
# a ragged batch, so a plain batch differs from each prompt alone.
BATCH_WRONGLY = (
    "afm7",
    "baichuan_m1",
    "bailing_moe_linear",
    "jamba",
    "longcat_flash_ngram",
    "nemotron_h",
    "olmo_hybrid",
)

# Latent attention: what is cached is a latent and its rotary part, one row for all heads.
LATENT = (
    "bailing_hybrid",
    "bailing_moe_v3",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k25",
    "kimi_k3",
    "kimi_linear",
    "kimi_vl",
    "mistral4",
)
# Two of them in each layer, with a cache each, of which a calibration cannot tell one from the other.
LATENT_TWICE = ("longcat_flash", "longcat_flash_ngram")


@cache
def model_of(architecture: str) -> nn.Module:
    """The shared model of an architecture. Who installs on it uninstalls again."""
    return tiny_model(architecture)

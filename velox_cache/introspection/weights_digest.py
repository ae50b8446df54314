"""What tells one model's weights from another's."""

import hashlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from velox_cache.introspection.shard import model_shard

SAMPLED = 64  # numbers of each array
_ADAPTERS = (".lora_a", ".lora_b")


def weights_digest(model: nn.Module) -> str | None:
    """A digest of the names, shapes, types and a sample of the numbers of a model's weights, in hexadecimal.

    The same weights in another precision have another digest, and so have those of a fine-tuned model. What a LoRA
    adapter adds is left out: a calibration serves the model with and without. None for a model that is spread over
    several processes, since each holds a part.
    """
    if model_shard(model).group is not None:
        return None
    flat: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    weights = {name.replace(".linear.", "."): array for name, array in flat.items() if not name.endswith(_ADAPTERS)}
    samples = {name: _sample(weights[name]) for name in sorted(weights)}
    mx.eval(samples)
    digest = hashlib.sha256()
    for name, sample in samples.items():
        digest.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}\n".encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()[:32]


def _sample(array: mx.array) -> mx.array:
    """The bytes of some numbers, spread over the array."""
    flat = array.reshape(-1)
    return mx.view(mx.contiguous(flat[:: max(1, flat.size // SAMPLED)][:SAMPLED]), mx.uint8)

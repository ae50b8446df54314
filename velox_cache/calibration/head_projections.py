"""The part of a layer's output projection that each KV head goes through."""

import mlx.core as mx

from velox_cache.introspection.attention_outputs import AttentionOutput
from velox_cache.introspection.shard import ModelShard


def head_grams(output: AttentionOutput, n_kv_heads: int, shard: ModelShard) -> mx.array:
    """Float32 [H, G D_v, G D_v]: x A x is the square of what a KV head's G query heads put out when they have read x.

    n_kv_heads: those of this rank. Collective where the model's heads are spread over ranks.
    """
    matrix = projection_matrix(output, shard).reshape(n_kv_heads, -1, output.width)
    return matrix @ matrix.swapaxes(-1, -2)


def projection_matrix(output: AttentionOutput, shard: ModelShard) -> mx.array:
    """Float32 [H_q D_v, width], of this rank's heads: what the projection makes of each of its inputs, one at a time.

    So the matrix of any module is found, quantised or adapted too. The sum over ranks that a sharded one puts out is
    taken apart by their inputs: each rank has some of the whole model's.
    """
    n_own, dtype = output.given.shape[-1], output.given.dtype
    first = shard.head_part * n_own
    inputs = mx.eye(shard.head_parts * n_own, dtype=dtype)[:, first : first + n_own]
    made = output.projection(mx.concatenate([inputs, mx.zeros((1, n_own), dtype)])[None])[0].astype(mx.float32)
    matrix: mx.array = (made - made[-1])[first : first + n_own]  # without a bias
    return matrix

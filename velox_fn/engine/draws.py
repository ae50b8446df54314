"""Numbers drawn by a hash of where they belong: a run can be repeated, whatever its batches and calls."""

from typing import TypeVar

import mlx.core as mx

from velox_fn.engine import checks

_ALL = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, mx.array)  # an array of uint32


def checked_draws(seed: object, layer: object, first_head: object) -> dict[str, int]:
    """The three numbers that tell draws apart, by name. ValueError unless they are whole and below 2^32."""
    draws = {"seed": seed, "layer": layer, "first_head": first_head}
    return {name: checks.whole_number(name, value, 0, _ALL) for name, value in draws.items()}


def layer_key(seed: int, layer: int) -> int:
    """What the draws of one layer begin with."""
    return mixed(mixed(seed) ^ layer)


def drawn_bits(of_layer: mx.array, first_head: mx.array | int, positions: mx.array, n_heads: int) -> mx.array:
    """Bits uint32 [B,H,n] of rows at positions int32, broadcastable to [B,H,n].

    of_layer: `layer_key` as uint32, broadcastable to [B,H,1]. first_head: the index in the layer of the first of the
    heads here.
    """
    heads = first_head + mx.arange(n_heads, dtype=mx.uint32)[:, None]
    return mixed(mixed(of_layer ^ heads) ^ positions.astype(mx.uint32))


def uniform(bits: mx.array) -> mx.array:
    """Float32 numbers uniform in [0, 1), of 24 bits, which float32 holds exactly."""
    return (bits >> 8).astype(mx.float32) * 2.0**-24


def gumbel(bits: mx.array) -> mx.array:
    """Float32 numbers of the standard Gumbel distribution, all finite."""
    inside = ((bits >> 9).astype(mx.float32) + 0.5) * 2.0**-23  # neither 0 nor 1
    return -mx.log(-mx.log(inside))


def mixed(bits: _Bits) -> _Bits:
    """Each number of 32 bits sent to another one, as MurmurHash3 finishes; one to one: positions never collide."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _ALL
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _ALL
    return bits ^ (bits >> 16)

"""Rotary position embedding as data, and moving keys that carry it to other positions.

RoPE turns each pair of a key's dimensions by an angle proportional to the token's position. A key that stands at
position p is moved to p' by turning it on by the angle of p' - p: nothing but the difference matters, so the key need
not be turned back first.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine import checks


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """A model's rotary embedding, in the terms of `mx.fast.rope`.

    Pair i of dims/2 turns by scale * position / freqs[i], where freqs[i] = base ** (2 i / dims) unless given (scaled
    forms such as Llama-3's give them). Raises ValueError when that cannot be a rotation.
    """

    dims: int  # dimensions of a key that turn; 0: none do
    base: float = 10000.0  # not used when freqs are given
    traditional: bool = False  # pairs are neighbours (2i, 2i+1) and not (i, i + dims/2)
    scale: float = 1.0  # of positions
    freqs: tuple[float, ...] | None = None  # dims/2 positive numbers; infinity: the pair does not turn
    first: int = 0  # where the dimensions that turn begin: some models' keys are [no RoPE, RoPE]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", checks.whole_number("dims", self.dims, 0))
        if self.dims % 2:
            raise ValueError(f"dims must be even, since RoPE turns pairs of dimensions, got {self.dims}")
        checks.whole_number("first", self.first, 0)
        if not self.base > 0 or not self.scale > 0:
            raise ValueError(f"base and scale must be above 0, got {self.base} and {self.scale}")
        if self.freqs is not None:
            object.__setattr__(self, "freqs", tuple(self.freqs))
            if len(self.freqs) != self.dims // 2 or not all(freq > 0 for freq in self.freqs):
                raise ValueError(
                    f"freqs must be {self.dims // 2} numbers above 0, a pair of dims={self.dims} each, got {self.freqs}"
                )

    def plain(self) -> dict[str, Any]:
        """The fields as plain JSON data; `RopeSpec(**plain)` is the same again."""
        return {**dataclasses.asdict(self), "freqs": None if self.freqs is None else list(self.freqs)}


def rope_spec(rope: RopeSpec | Mapping[str, Any]) -> RopeSpec:
    """`rope`, from plain data where it is not a RopeSpec yet."""
    return rope if isinstance(rope, RopeSpec) else RopeSpec(**rope)


def rope_remap_positions(keys: mx.array, old: mx.array, new: mx.array, rope: RopeSpec) -> mx.array:
    """Keys that stand at positions `old`, moved to positions `new`.

    The angles and the turn are float32. A key that does not move stays as it is.

    Args:
        keys: [B,H,n,D], any float dtype, which the result has too.
        old: int32, broadcastable to [B,H,n].
        new: int32, broadcastable to [B,H,n].
        rope: the model's rotary embedding.

    Raises:
        ValueError: the keys are narrower than the rotation.
    """
    if rope.first + rope.dims > keys.shape[-1]:
        raise ValueError(
            f"rope turns {rope.dims} dimensions from {rope.first} on, but keys have {keys.shape[-1]}; read it from the "
            "keys' own model"
        )
    cos, sin = _rotation((new - old).astype(mx.float32), rope)
    return turn_by(keys, cos, sin, rope)


def mean_rotation(first: mx.array, n_positions: int, rope: RopeSpec) -> tuple[mx.array, mx.array]:
    """Cosines and sines float32 [B,dims/2] of the mean rotation of `n_positions` positions from `first` [B] on."""
    positions = first[:, None] + mx.arange(n_positions)
    cos, sin = _rotation(positions.astype(mx.float32), rope)
    return cos.mean(axis=1), sin.mean(axis=1)


def turn_by(vectors: mx.array, cos: mx.array, sin: mx.array, rope: RopeSpec) -> mx.array:
    """Vectors [...,D] turned by the given cosines and sines, broadcastable to [...,dims/2]; the vectors' dtype."""
    before, _, after = mx.split(vectors, [rope.first, rope.first + rope.dims], axis=-1)
    first, second = rotary_pairs(vectors, rope)
    parts = [first * cos - second * sin, first * sin + second * cos]
    if rope.traditional:
        turned = mx.stack(parts, axis=-1).reshape(*vectors.shape[:-1], rope.dims)
    else:
        turned = mx.concatenate(parts, axis=-1)
    return mx.concatenate([before, turned.astype(vectors.dtype), after], axis=-1)


def rotary_pairs(vectors: mx.array, rope: RopeSpec) -> tuple[mx.array, mx.array]:
    """The first and second numbers float32 [...,dims/2] of the pairs that turn, of vectors [...,D]."""
    turned = vectors[..., rope.first : rope.first + rope.dims].astype(mx.float32)
    if rope.traditional:
        return turned[..., 0::2], turned[..., 1::2]
    return turned[..., : rope.dims // 2], turned[..., rope.dims // 2 :]


def pair_angles(rope: RopeSpec) -> mx.array:
    """By how much each pair turns from one position to the next, float32 [dims/2]."""
    if rope.freqs is None:
        angles: mx.array = rope.base ** (-mx.arange(0, rope.dims, 2, dtype=mx.float32) / max(rope.dims, 1))
    else:
        angles = 1 / mx.array(rope.freqs, mx.float32)
    return rope.scale * angles


def _rotation(turns: mx.array, rope: RopeSpec) -> tuple[mx.array, mx.array]:
    """Cosine and sine float32 [...,dims/2] of the rotation by that many positions, float32 [...]."""
    angles = turns[..., None] * pair_angles(rope)
    return mx.cos(angles), mx.sin(angles)

"""Moving keys from position to position: as if they had been rotated there from the start."""

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.rope_utils import initialize_rope

from velox_cache.introspection.rope import rope_specs_of
from velox_fn import RopeSpec, rope_remap_positions

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
ROPES = {
    "plain": nn.RoPE(16, base=100.0),
    "traditional": nn.RoPE(16, traditional=True, base=100.0),
    "partial": nn.RoPE(8, base=100.0),
    "scaled": nn.RoPE(16, base=100.0, scale=0.25),
    "linear": initialize_rope(16, 100.0, False, {"rope_type": "linear", "factor": 4.0}),
    "llama3": initialize_rope(16, 100.0, False, LLAMA3, 256),
    "llama3 traditional": initialize_rope(16, 100.0, True, LLAMA3, 256),
    "yarn": initialize_rope(16, 100.0, False, YARN, 256),
    "longrope": initialize_rope(16, 100.0, False, LONGROPE, 256),
    "proportional": initialize_rope(16, 100.0, False, PROPORTIONAL),
}
every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())

KEYS = mx.random.normal((1, 2, 5, 16), key=mx.random.key(0))
OLD = mx.array([3, 0, 170, 40, 41])
NEW = mx.array([200, 5, 1, 40, 0])


def rotated(rope, keys, positions):
    """Each key rotated by the model's own rope, one by one."""
    return mx.concatenate([rope(keys[:, :, i : i + 1], offset=p) for i, p in enumerate(positions.tolist())], axis=2)


@every_rope
def test_moving_agrees_with_rotating_from_scratch(rope):
    moved = rope_remap_positions(rotated(rope, KEYS, OLD), OLD, NEW, rope_specs_of(rope)[0])
    np.testing.assert_allclose(np.array(moved), np.array(rotated(rope, KEYS, NEW)), atol=2e-4)


@every_rope
def test_moving_there_and_back_is_staying(rope):
    spec = rope_specs_of(rope)[0]
    back = rope_remap_positions(rope_remap_positions(KEYS, OLD, NEW, spec), NEW, OLD, spec)
    np.testing.assert_allclose(np.array(back), np.array(KEYS), atol=1e-5)


@given(st.lists(st.integers(0, 100_000), min_size=3, max_size=3))
def test_a_move_by_steps_is_one_move(stops):
    spec, keys = RopeSpec(dims=16, base=10_000.0), KEYS[:, :, :1]
    start, between, end = (mx.array([stop]) for stop in stops)
    by_steps = rope_remap_positions(rope_remap_positions(keys, start, between, spec), between, end, spec)
    # Angles are float32: a position of 100,000 is known to about 0.01 rad.
    np.testing.assert_allclose(np.array(by_steps), np.array(rope_remap_positions(keys, start, end, spec)), atol=0.1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_keys_that_do_not_move_stay_bit_for_bit(dtype):
    keys = KEYS.astype(dtype)
    moved = rope_remap_positions(keys, OLD, OLD, RopeSpec(dims=16))
    assert moved.dtype == dtype
    assert mx.array_equal(moved, keys).item()


def test_dimensions_past_the_rotation_stay():
    moved = rope_remap_positions(KEYS, OLD, NEW, RopeSpec(dims=6))
    assert mx.array_equal(moved[..., 6:], KEYS[..., 6:]).item()
    assert not mx.allclose(moved[..., :6], KEYS[..., :6]).item()


@pytest.mark.parametrize("traditional", [False, True])
def test_dimensions_before_the_rotation_stay(traditional):
    spec = RopeSpec(dims=8, base=50.0, traditional=traditional)
    moved = rope_remap_positions(KEYS, OLD, NEW, dataclasses.replace(spec, first=6))
    assert mx.array_equal(moved[..., :6], KEYS[..., :6]).item()
    assert mx.array_equal(moved[..., 14:], KEYS[..., 14:]).item()
    assert mx.array_equal(moved[..., 6:14], rope_remap_positions(KEYS[..., 6:14], OLD, NEW, spec)).item()


def test_without_rotated_dimensions_nothing_moves():
    assert mx.array_equal(rope_remap_positions(KEYS, OLD, NEW, RopeSpec(dims=0)), KEYS).item()


@every_rope
def test_plain_data_gives_the_same_rope_back(rope):
    spec = rope_specs_of(rope)[0]
    assert RopeSpec(**json.loads(json.dumps(spec.plain()))) == spec


@pytest.mark.parametrize("spec", [RopeSpec(dims=32), RopeSpec(dims=8, first=9)])
def test_keys_narrower_than_the_rotation_are_refused(spec):
    with pytest.raises(ValueError, match=f"turns {spec.dims} dimensions from {spec.first} on, but keys have 16"):
        rope_remap_positions(KEYS, OLD, NEW, spec)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"dims": 7}, "dims must be even"),
        ({"dims": -2}, "dims"),
        ({"dims": 8, "base": 0.0}, "base and scale"),
        ({"dims": 8, "scale": -1.0}, "base and scale"),
        ({"dims": 8, "freqs": (1.0, 2.0)}, "freqs must be 4"),
        ({"dims": 4, "freqs": (1.0, 0.0)}, "freqs must be 2"),
    ],
)
def test_what_is_no_rotation_is_refused(fields, what):
    with pytest.raises(ValueError, match=what):
        RopeSpec(**fields)

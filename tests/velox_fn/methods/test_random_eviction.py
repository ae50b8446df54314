"""Random eviction: a lot that can be drawn again, and that is fair."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, tokens
from oracles import best_positions

from velox_fn import kept_positions, random_eviction


def mixed(bits):
    """MurmurHash3's last step in whole numbers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * factor % 2**32
    return bits ^ (bits >> 16)


def lot(seed, layer, head, position):
    return mixed(mixed(mixed(mixed(seed) ^ layer) ^ head) ^ position) >> 8


@pytest.mark.parametrize(("seed", "layer"), [(0, 0), (7, 3), (2**32 - 1, 29)])
def test_rows_stay_by_the_hash_of_seed_layer_head_and_position(seed, layer):
    keys, values, _ = tokens(60)
    found = kept_after(random_eviction(budget=12, n_sink=2, seed=seed, layer=layer), keys, values, None, [30, 1, 29])
    for head in range(2):
        scores = np.array([lot(seed, layer, head, position) for position in range(60)])
        assert found[head] == best_positions(scores, list(range(60)), 60, budget=12, n_sink=2)


def test_every_sequence_of_a_batch_draws_alike():
    keys = mx.zeros((3, 2, 50, 4))
    method = random_eviction(budget=10)
    state, _ = method.update(method.init(3, 2, 4, 4), keys, keys)
    positions = np.array(kept_positions(state))
    np.testing.assert_array_equal(positions, np.broadcast_to(positions[:1], positions.shape))


def test_lots_are_uniform():
    # The mean kept position of 1,000 of 20,000 has a deviation of about 180 around 10,000.
    keys = mx.zeros((1, 2, 20_000, 1))
    method = random_eviction(budget=1_000, n_sink=0)
    state, _ = method.update(method.init(1, 2, 1, 1), keys, keys)
    np.testing.assert_allclose(np.array(kept_positions(state)).mean(-1), 10_000, atol=800)


@pytest.mark.parametrize("setting", ["seed", "layer"])
@pytest.mark.parametrize("value", [-1, 2**32, 1.5])
def test_seed_and_layer_must_fit_the_hash(setting, value):
    with pytest.raises(ValueError, match=setting):
        random_eviction(**{setting: value})

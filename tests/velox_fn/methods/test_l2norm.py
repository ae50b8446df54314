"""L2Norm keeps small keys."""

import mlx.core as mx
import numpy as np
from arm_oracle import kept_after, tokens
from oracles import best_positions

from velox_fn import l2norm


def test_keys_of_the_smallest_norm_stay():
    keys, values, _ = tokens(40)
    found = kept_after(l2norm(budget=10, n_sink=2), keys, values, None, [25, 1, 14])
    for head in range(2):
        norms = np.linalg.norm(keys[head].astype(np.float64), axis=-1)
        assert found[head] == best_positions(-norms, list(range(40)), 40, budget=10, n_sink=2)


def test_half_precision_keys_are_squared_in_float32():
    # 300^2 is past the largest float16, so a square in float16 would make the larger two equal and keep the first.
    sizes = np.array([400.0, 300.0, 1.0], np.float16)
    keys = mx.array(sizes[None, None, :, None])
    method = l2norm(budget=2, n_sink=0)
    state, _ = method.update(method.init(1, 1, 1, 1, mx.float16), keys, keys)
    assert mx.array_equal(state.store.keys[0, 0, :2, 0], keys[0, 0, 1:, 0]).item()

"""H2O without gaps: what it scores by, the rope that it turns by, and what it stores."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import attention, kept_after, simulated, tokens

from velox_fn import RopeSpec, h2o, kv, rope_remap_positions

ROPE = RopeSpec(dims=8, base=50.0)


@pytest.mark.parametrize("calls", [[30, 1, 1, 8], [1] * 40])
def test_renumbered_rows_are_scored_where_attention_saw_them(calls):
    keys, values, queries = tokens(40, seed=1)
    queries *= 4  # sharp attention, so that the rows' places decide which stay
    method = h2o(budget=10, n_sink=2, grace=3, renumber=True, rope=ROPE)
    found = kept_after(method, keys, values, queries, calls)
    assert found != kept_after(h2o(budget=10, n_sink=2, grace=3), keys, values, queries, calls)
    for head in range(2):

        def score(held, old, block, head=head):
            places = np.arange(block[-1] + 1 - len(held), block[-1] + 1)
            moved = keys[head].copy()
            moved[held] = np.array(
                rope_remap_positions(mx.array(keys[head][None, None, held]), mx.array(held), mx.array(places), ROPE)
            )[0, 0]
            heads = (2 * head, 2 * head + 1)
            new = sum(attention(queries[h, block], block, moved, held).sum(0) for h in heads)
            return new + np.array([old[row] for row in held])

        assert found[head] == simulated(calls, score, budget=10, n_sink=2, recent=3)


def test_rope_base_takes_the_place_of_the_models():
    keys, values, queries = (mx.array(part[None]) for part in tokens(30))
    views = []
    for method in (
        h2o(budget=10, grace=3, renumber=True, rope=ROPE, rope_base=9.0),
        h2o(budget=10, grace=3, renumber=True, rope=RopeSpec(dims=8, base=9.0)),
    ):
        state, _ = method.update(method.init(1, 2, 8, 6), keys, values, queries=queries)
        views.append(method.update(state, keys[:, :, :3], values[:, :, :3], queries=queries[:, :, :3])[1][0])
    assert mx.array_equal(*views).item()


def test_rope_base_without_a_base_to_replace_is_refused():
    with pytest.raises(ValueError, match="rope_base"):
        h2o(renumber=True, rope=RopeSpec(dims=4, freqs=(1.0, 10.0)), rope_base=9.0)


def test_settings_rebuild_the_method_from_plain_data():
    made = h2o(budget=10, grace=3, renumber=True, rope=ROPE, rope_base=9.0)
    again = h2o(**made.settings)
    assert again.settings == made.settings


def test_stored_rows_are_not_turned():
    keys, values, queries = tokens(40)
    method = h2o(budget=10, n_sink=2, grace=3, renumber=True, rope=ROPE)
    state = method.init(1, 2, 8, 6)
    for block in (slice(0, 30), slice(30, 31), slice(31, 40)):
        given = (mx.array(part[None, :, block]) for part in (keys, values))
        state, _ = method.update(state, *given, queries=mx.array(queries[None, :, block]))
    kept = np.array(kv(state)[0])[0].reshape(-1, 8)
    arrived = {key.tobytes() for key in keys.reshape(-1, 8)}
    assert all(row.tobytes() in arrived for row in kept)

"""Renumbering: attention sees the kept rows without gaps, and nothing else changes."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import tokens

from velox_fn import RopeSpec, h2o, kept_positions, rope_remap_positions, streaming_llm
from velox_fn.engine.batch import merge

ROPE = RopeSpec(dims=8, base=50.0)
METHODS = {
    "streaming_llm": lambda **settings: streaming_llm(budget=10, n_sink=2, **settings),
    "h2o": lambda **settings: h2o(budget=10, n_sink=2, grace=3, **settings),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())


def fed(method, calls, batch=1):
    """(state before, block's length, view) of each call."""
    keys, values, queries = (mx.array(np.repeat(part[None], batch, 0)) for part in tokens(sum(calls)))
    state, start, seen = method.init(batch, 2, 8, 6), 0, []
    for n_tokens in calls:
        block = slice(start, start + n_tokens)
        before = state
        state, view = method.update(state, keys[:, :, block], values[:, :, block], queries=queries[:, :, block])
        start += n_tokens
        seen.append((before, n_tokens, view))
    return keys, seen


def set_of(rows):
    """Rows of each head in an order of their own, since a view's row order is free."""
    return [sorted(map(tuple, head.round(3).tolist())) for head in np.array(rows)[0]]


@every_method
@pytest.mark.parametrize("calls", [[20, 1, 1, 7, 1, 1], [10, 1, 1, 3], [10, 1, 4]])
def test_view_holds_the_kept_rows_without_gaps(make, calls):
    keys, seen = fed(make(renumber=True, rope=ROPE), calls)
    offset = 0
    for before, n_tokens, (view_keys, _) in seen:
        new = mx.arange(offset, offset + n_tokens)
        held = mx.broadcast_to(new, (1, 2, n_tokens))
        if offset:
            held = mx.concatenate([kept_positions(before), held], axis=-1)
        offset += n_tokens
        rows = mx.take_along_axis(keys, held[..., None], axis=2)
        places = mx.arange(offset - held.shape[-1], offset)
        expected = rope_remap_positions(rows, held, places, ROPE)
        np.testing.assert_allclose(set_of(view_keys), set_of(expected), atol=2e-3)


@every_method
def test_before_the_first_eviction_the_view_is_what_came(make):
    keys, seen = fed(make(renumber=True, rope=ROPE), [4, 1, 15])
    assert mx.array_equal(seen[-1][2][0], keys).item()


@every_method
def test_values_are_not_moved(make):
    renumbered = fed(make(renumber=True, rope=ROPE), [20, 1, 1, 7])[1][-1][2][1]
    assert renumbered.shape == (1, 2, 17, 6)


def test_renumbering_changes_what_is_seen_and_not_what_is_kept_by_position():
    plain, renumbered = (streaming_llm(budget=10, n_sink=2, **more) for more in ({}, {"renumber": True, "rope": ROPE}))
    one, other = fed(plain, [20, 1, 9])[1][-1], fed(renumbered, [20, 1, 9])[1][-1]
    assert kept_positions(one[0]).tolist() == kept_positions(other[0]).tolist()
    assert not mx.allclose(one[2][0], other[2][0]).item()


@every_method
def test_each_sequence_of_a_ragged_batch_is_renumbered_as_alone(make):
    method = make(renumber=True, rope=ROPE)
    keys, values, queries = (mx.array(part[None]) for part in tokens(30))
    states = []
    for n_tokens in (6, 25):
        first = (part[:, :, :n_tokens] for part in (keys, values))
        states.append(method.update(method.init(1, 2, 8, 6), *first, queries=queries[:, :, :n_tokens])[0])
    block = [part[:, :, 25:28] for part in (keys, values, queries)]
    alone = [method.update(state, *block[:2], queries=block[2])[1][0] for state in states]
    twice = [mx.concatenate([part, part]) for part in block]
    together = method.update(merge(states), *twice[:2], queries=twice[2])[1][0]
    # The view of the short sequence has padding after its 6 rows.
    short = mx.concatenate([together[:1, :, :6], together[:1, :, -3:]], axis=2)
    np.testing.assert_allclose(np.array(short), np.array(alone[0]), atol=1e-5)
    np.testing.assert_allclose(np.array(together[1:]), np.array(alone[1]), atol=1e-5)


@every_method
def test_padded_blocks_are_renumbered_after_single_tokens_within_the_budget(make):
    method, valid = make(renumber=True, rope=ROPE), mx.array([3], mx.int32)
    keys, values, queries = (mx.array(part[None]) for part in tokens(8))
    views = []
    for calls in ([5], [1] * 5):
        state, start = method.init(1, 2, 8, 6), 0
        for n_tokens in calls:
            block = [part[:, :, start : start + n_tokens] for part in (keys, values, queries)]
            state, _ = method.update(state, *block[:2], queries=block[2])
            start += n_tokens
        last = [part[:, :, 5:] for part in (keys, values, queries)]
        views.append(method.update(state, *last[:2], queries=last[2], valid=valid)[1][0])
    np.testing.assert_array_equal(np.array(views[1]), np.array(views[0]))


@every_method
def test_renumbering_without_a_rope_is_refused(make):
    with pytest.raises(ValueError, match="renumber=True turns keys"):
        make(renumber=True)


def turned(rows, positions, spec=ROPE):
    """Rows [H,n,8] at positions [H,n], turned from 0 on in float64."""
    angles = positions[..., None] * spec.base ** (-np.arange(4) / 4)
    first, second = rows[..., :4], rows[..., 4:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


@every_method
def test_the_error_of_the_view_does_not_grow_with_the_steps(make):
    n_steps, method = 200, make(renumber=True, rope=ROPE)
    raw, values, queries = tokens(n_steps)
    everywhere = np.broadcast_to(np.arange(n_steps), (2, n_steps))
    keys = mx.array(turned(raw, everywhere)[None].astype(np.float32))
    values, queries = mx.array(values[None]), mx.array(queries[None])
    state = method.init(1, 2, 8, 6)
    for t in range(n_steps):
        held = np.array(kept_positions(state))[0] if t else np.zeros((2, 0), int)
        step = slice(t, t + 1)
        state, (seen, _) = method.update(state, keys[:, :, step], values[:, :, step], queries=queries[:, :, step])
        held = np.concatenate([held, np.full((2, 1), t)], axis=-1)
        places = np.broadcast_to(np.arange(t + 1 - held.shape[-1], t + 1), held.shape)
        expected = turned(np.take_along_axis(raw, held[..., None], 1), places)
        found = np.array(seen)[0]
        in_order = [np.lexsort(rows.round(2).T) for rows in (*found, *expected)]  # a view's row order is free
        for head in range(2):
            np.testing.assert_allclose(
                found[head][in_order[head]], expected[head][in_order[2 + head]], atol=5e-4, err_msg=f"step {t}"
            )

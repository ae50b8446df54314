"""Laws of a state: a record, pure, traceable, and evaluated with its view."""

from typing import Any

import mlx.core as mx
import numpy as np

from velox_fn.engine.eviction import Eviction, check_state
from velox_fn.engine.records import arrays, with_arrays
from velox_fn.testing.trials import (
    LAYER,
    Layer,
    Tokens,
    begun,
    bits,
    block,
    cut_out,
    enough,
    fed,
    hold,
    operations,
    positions,
    proxies,
    same_kept,
)


def states_are_records(method: Eviction, layer: Layer = LAYER) -> None:
    """A state is a record with a store, and every array in it has the batch first."""
    for batch in (1, 3):
        try:
            check_state(begun(method, block(1, batch=batch, layer=layer)), method.name, batch)
        except ValueError as error:
            raise AssertionError(str(error)) from error


def a_state_can_be_forked(method: Eviction, layer: Layer = LAYER) -> None:
    """An update leaves the state that it was given as it was, to be gone on from again."""
    n = enough(method, layer)
    tokens = block(n + 30, layer=layer)
    for proxy in proxies(method):
        before = fed(method, tokens, [n, 1, 1], proxy=proxy)
        mx.eval(arrays(before))
        held = [bits(leaf).copy() for leaf in arrays(before)]
        for start, n_tokens in ((n + 2, 1), (n + 3, 27), (n + 10, 1)):
            keys, values, queries = cut_out(tokens, start, n_tokens)
            once, view = method.update(before, keys, values, queries=None if proxy else queries)
            mx.eval(arrays(once), view)
            again, _ = method.update(before, keys, values, queries=None if proxy else queries)
            hold(same_kept(once, again), "the same state and block give another result the second time")
        for leaf, then in zip(arrays(before), held, strict=True):
            hold(np.array_equal(bits(leaf), then), "an update changes the state that it was given")


def an_update_traces(method: Eviction, layer: Layer = LAYER) -> None:
    """An update is of MLX operations alone, and waits for nothing: `mx.compile` takes it, in any state."""
    n = enough(method, layer)
    tokens = block(n + 10, layer=layer)
    for calls in ([], [5], [n], [n, 1, 1]):
        state = fed(method, tokens, calls)
        for n_tokens in (1, 7):
            for proxy in proxies(method):
                _traces(method, state, cut_out(tokens, n + 2, n_tokens), proxy)


def a_compiled_step_serves_the_next_ones(method: Eviction, layer: Layer = LAYER) -> None:
    """A step compiled at the first token over budget keeps what eager steps keep: no static field may go on."""
    n = enough(method, layer)
    tokens = block(n + 15, layer=layer)
    state = fed(method, tokens, [n, 1])

    def step(leaves: list[mx.array], keys: mx.array, values: mx.array) -> list[mx.array]:
        return arrays(method.update(with_arrays(state, leaves), keys, values)[0])

    compiled = mx.compile(step)
    leaves, eager = arrays(state), state
    for t in range(n + 1, n + 15):
        keys, values, _ = cut_out(tokens, t, 1)
        leaves = compiled(leaves, keys, values)
        eager, _ = method.update(eager, keys, values)
    found = positions(with_arrays(state, leaves))
    hold(np.array_equal(found, positions(eager)), "compiled once, later steps keep other rows than eager ones")


def nothing_is_left_unevaluated(method: Eviction, layer: Layer = LAYER) -> None:
    """Whoever evaluates the view has evaluated the state: else its graph grows with every token."""
    n = enough(method, layer)
    for start in (1, n):
        tokens = block(start + n + 10, layer=layer)
        state = fed(method, tokens, [start])
        mx.eval(arrays(state))
        for t in range(start, start + n + 10):
            keys, values, _ = cut_out(tokens, t, 1)
            state, view = method.update(state, keys, values)
            mx.eval(view)
        deepest = max(operations([leaf]) for leaf in arrays(state))
        hold(deepest <= 1, f"an array of the state has {deepest} operations to go; tie it to the view by mx.depends")


def _traces(method: Eviction, state: Any, new: Tokens, proxy: bool) -> None:
    def step(
        leaves: list[mx.array], keys: mx.array, values: mx.array, queries: mx.array | None = None
    ) -> list[mx.array]:
        after, view = method.update(with_arrays(state, leaves), keys, values, queries=queries)
        return [*arrays(after), *view]

    given = new[:2] if proxy else new
    expected = step(arrays(state), *given)
    try:
        found = mx.compile(step)(arrays(state), *given)
    except Exception as error:
        raise AssertionError(f"an update cannot be compiled: {error}") from error
    hold(len(expected) == len(arrays(state)) + 2, "an update changes the number of arrays in the state")
    shapes = [[(leaf.shape, leaf.dtype) for leaf in leaves] for leaves in (found, expected)]
    hold(shapes[0] == shapes[1], "a compiled update gives other shapes")

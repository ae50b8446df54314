"""The laws that every method keeps, as functions to run on a method of one's own.

    from velox_fn.testing import check_method
    check_method(my_method(budget=16))

A law takes an Eviction and the layer to try it on, and raises AssertionError that says what does not hold. The budget
should be small: blocks of a few times as many tokens are tried. This package's own tests run the same functions. What
they look at is copied to the host, so this is no part of a model's run.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from velox_fn.engine.eviction import Eviction, check_state, kept_bytes, kept_positions, kv
from velox_fn.engine.records import arrays, with_arrays

Tokens = tuple[mx.array, mx.array, mx.array]
"""keys [B,H,S,D], values [B,H,S,D_v], queries [B,H_q,S,D]"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The heads that a method is tried on: those of its params, where it has any."""

    n_kv_heads: int = 2
    n_heads: int = 4
    head_dim: int = 8
    value_dim: int = 6


Law = Callable[[Eviction, Layer], None]
LAYER = Layer()
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def check_method(method: Eviction, layer: Layer = LAYER) -> None:
    """Run every law. Raises AssertionError that names the first one broken, ValueError for a method at intervals."""
    if method.settings.get("interval", 1) != 1:
        raise ValueError(
            f"the laws are those of a method that evicts with every call, got interval={method.settings['interval']}; "
            "at_intervals adds the rest, and is tested itself: give the method with interval=1"
        )
    for name, law in LAWS.items():
        try:
            law(method, layer)
        except AssertionError as error:
            raise AssertionError(f"{method.name} breaks the law {name}: {error}") from error


def block(n_tokens: int, seed: int = 0, batch: int = 1, dtype: mx.Dtype = mx.float32, layer: Layer = LAYER) -> Tokens:
    """Random tokens."""
    rng = np.random.default_rng(seed)

    def rows(heads: int, dim: int) -> mx.array:
        return mx.array(rng.standard_normal((batch, heads, n_tokens, dim)).astype(np.float32)).astype(dtype)

    keys, values = rows(layer.n_kv_heads, layer.head_dim), rows(layer.n_kv_heads, layer.value_dim)
    return keys, values, rows(layer.n_heads, layer.head_dim)


def fed(method: Eviction, tokens: Tokens, calls: Sequence[int], *, proxy: bool = True) -> Any:
    """The state after `tokens` in calls of these sizes; the keys stand in for queries unless told otherwise."""
    state, start = _begun(method, tokens), 0
    for n_tokens in calls:
        keys, values, queries = _cut(tokens, start, n_tokens)
        state, _ = method.update(state, keys, values, queries=None if proxy else queries)
        start += n_tokens
    return state


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's bytes, so that NaN equals NaN and nothing is rounded."""
    return np.array(array.view(mx.uint8) if array.dtype != mx.bool_ else array)


def positions(state: Any) -> np.ndarray[Any, Any]:
    """The kept positions [B,H,n], on the host."""
    return np.array(kept_positions(state))


def same_kept(one: Any, other: Any) -> bool:
    """Whether two states keep the same rows, bit for bit."""
    pairs = zip((*kv(one), kept_positions(one)), (*kv(other), kept_positions(other)), strict=True)
    return all(np.array_equal(bits(a), bits(b)) for a, b in pairs)


def operations(outputs: Sequence[mx.array]) -> int:
    """Operations in the graph behind arrays that are not evaluated."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return graph.getvalue().count("[label")


def states_are_records(method: Eviction, layer: Layer = LAYER) -> None:
    """A state is a record with a store, and every array in it has the batch first."""
    for batch in (1, 3):
        try:
            check_state(_begun(method, block(1, batch=batch, layer=layer)), method.name, batch)
        except ValueError as error:
            raise AssertionError(str(error)) from error


def the_budget_holds(method: Eviction, layer: Layer = LAYER) -> None:
    """As many rows as the budget says are kept, whatever the calls."""
    budget, n_over = _budget(method), _enough(method, layer)
    calls = (1, 4, 3, 1, 1, n_over + 257, 1, 1, 2)
    for proxy in (True, False):
        tokens = block(sum(calls), layer=layer)
        state, seen = _begun(method, tokens), 0
        for n_tokens in calls:
            keys, values, queries = _cut(tokens, seen, n_tokens)
            state, _ = method.update(state, keys, values, queries=None if proxy else queries)
            seen += n_tokens
            expected = _most_kept(method, layer, seen)
            _hold(
                positions(state).shape[2] == expected,
                f"after {seen} tokens {positions(state).shape[2]} rows are kept under a budget of {budget}, and not "
                f"{expected}",
            )


def the_offset_counts_tokens(method: Eviction, layer: Layer = LAYER) -> None:
    """`offset` is the tokens seen, not the rows kept."""
    n = 2 * _enough(method, layer)
    for calls in ([1] * n, [n // 2, 1, 1, n - n // 2 - 2]):
        offset = fed(method, block(n, layer=layer), calls).store.offset.tolist()
        _hold(offset == [n], f"offset is {offset} after {n} tokens")


def kept_rows_are_tokens_in_order(method: Eviction, layer: Layer = LAYER) -> None:
    """A kept row is a token's, bit for bit, at its position, and rows stand in temporal order."""
    n = _enough(method, layer)
    for proxy in (True, False):
        tokens = block(n + 40, seed=1, layer=layer)
        state = fed(method, tokens, [n, 1, 1, 1, 20, *[1] * 17], proxy=proxy)
        at = kept_positions(state)
        _hold(bool((np.diff(positions(state)) > 0).all()), "kept rows do not stand in temporal order")
        for kept, given, what in zip(kv(state), tokens[:2], ("keys", "values"), strict=True):
            own = mx.take_along_axis(given, at[..., None], axis=2)
            _hold(np.array_equal(bits(kept), bits(own)), f"kept {what} are not those of the tokens there")


def the_dtype_stays(method: Eviction, layer: Layer = LAYER) -> None:
    """Keys and values keep the model's own dtype and width."""
    n = _enough(method, layer)
    for dtype in DTYPES:
        keys, values = kv(fed(method, block(n + 10, dtype=dtype, layer=layer), [n, 1, 1, 8]))
        _hold((keys.dtype, values.dtype) == (dtype, dtype), f"{dtype} rows became {keys.dtype}, {values.dtype}")
        widths = (keys.shape[3], values.shape[3])
        _hold(widths == (layer.head_dim, layer.value_dim), f"rows are {widths} wide")


def sinks_and_recent_rows_stay(method: Eviction, layer: Layer = LAYER) -> None:
    """The first `n_sink` and the last `recent` positions are kept."""
    n = _enough(method, layer) + 10
    for calls in ([n], [n - 1, 1], [1] * n):
        state = fed(method, block(n, layer=layer), calls)
        found, store = positions(state), state.store
        _hold(bool((found[..., : store.n_sink] == np.arange(store.n_sink)).all()), "a sink has left")
        last = np.arange(n - store.recent, n)
        _hold(bool((found[..., found.shape[2] - store.recent :] == last).all()), "a recent row has left")


def a_block_sees_what_was_kept_and_itself(method: Eviction, layer: Layer = LAYER) -> None:
    """The view is the rows kept before the call and the block, which nothing leaves before it has attended."""
    n = _enough(method, layer)
    tokens = block(n + 12, layer=layer)
    for proxy in (True, False):
        keys, values, queries = _cut(tokens, 0, n)
        _, view = method.update(_begun(method, tokens), keys, values, queries=None if proxy else queries)
        for seen, given in zip(view, (keys, values), strict=True):
            _hold(np.array_equal(bits(seen), bits(given)), "the first block does not see itself and nothing else")
    if method.shown is not None:  # attention sees other rows than are stored
        return
    for calls in ([n // 2], [n], [n, 1, 1], [n, 1, 1, 1]):
        before = fed(method, tokens, calls)
        for n_tokens in (1, 9):
            new = _cut(tokens, sum(calls), n_tokens)[:2]
            _, view = method.update(before, *new)
            for seen, kept, given in zip(view, kv(before), new, strict=True):
                whole = mx.concatenate([kept, given], axis=2)
                _hold(_as_sets(seen) == _as_sets(whole), f"{n_tokens} tokens see other rows than those kept and theirs")
                last = seen[:, :, kept.shape[2] :]
                _hold(n_tokens == 1 or np.array_equal(bits(last), bits(given)), "a block does not stand last, in order")


def a_state_can_be_forked(method: Eviction, layer: Layer = LAYER) -> None:
    """An update leaves the state that it was given as it was, to be gone on from again."""
    n = _enough(method, layer)
    tokens = block(n + 30, layer=layer)
    for proxy in (True, False):
        before = fed(method, tokens, [n, 1, 1], proxy=proxy)
        mx.eval(arrays(before))
        held = [bits(leaf).copy() for leaf in arrays(before)]
        for start, n_tokens in ((n + 2, 1), (n + 3, 27), (n + 10, 1)):
            keys, values, queries = _cut(tokens, start, n_tokens)
            once, view = method.update(before, keys, values, queries=None if proxy else queries)
            mx.eval(arrays(once), view)
            again, _ = method.update(before, keys, values, queries=None if proxy else queries)
            _hold(same_kept(once, again), "the same state and block give another result the second time")
        for leaf, then in zip(arrays(before), held, strict=True):
            _hold(np.array_equal(bits(leaf), then), "an update changes the state that it was given")


def an_update_traces(method: Eviction, layer: Layer = LAYER) -> None:
    """An update is of MLX operations alone, and waits for nothing: `mx.compile` takes it, in any state."""
    n = _enough(method, layer)
    tokens = block(n + 10, layer=layer)
    for calls in ([], [5], [n], [n, 1, 1]):
        state = fed(method, tokens, calls)
        for n_tokens in (1, 7):
            for proxy in (True, False):
                _traces(method, state, _cut(tokens, n + 2, n_tokens), proxy)


def a_compiled_step_serves_the_next_ones(method: Eviction, layer: Layer = LAYER) -> None:
    """A step compiled at the first token over budget keeps what eager steps keep: no static field may go on."""
    n = _enough(method, layer)
    tokens = block(n + 15, layer=layer)
    state = fed(method, tokens, [n, 1])

    def step(leaves: list[mx.array], keys: mx.array, values: mx.array) -> list[mx.array]:
        return arrays(method.update(with_arrays(state, leaves), keys, values)[0])

    compiled = mx.compile(step)
    leaves, eager = arrays(state), state
    for t in range(n + 1, n + 15):
        keys, values, _ = _cut(tokens, t, 1)
        leaves = compiled(leaves, keys, values)
        eager, _ = method.update(eager, keys, values)
    found = positions(with_arrays(state, leaves))
    _hold(np.array_equal(found, positions(eager)), "compiled once, later steps keep other rows than eager ones")


def nothing_is_left_unevaluated(method: Eviction, layer: Layer = LAYER) -> None:
    """Whoever evaluates the view has evaluated the state: else its graph grows with every token."""
    n = _enough(method, layer)
    for start in (1, n):
        tokens = block(start + n + 10, layer=layer)
        state = fed(method, tokens, [start])
        mx.eval(arrays(state))
        for t in range(start, start + n + 10):
            keys, values, _ = _cut(tokens, t, 1)
            state, view = method.update(state, keys, values)
            mx.eval(view)
        deepest = max(operations([leaf]) for leaf in arrays(state))
        _hold(deepest <= 1, f"an array of the state has {deepest} operations to go; tie it to the view by mx.depends")


def rows_that_are_not_finite_lose(method: Eviction, layer: Layer = LAYER) -> None:
    """NaN or infinity in a key or value costs that row its place, and nothing else."""
    n = _enough(method, layer) + 10
    sinks = _begun(method, block(1, layer=layer)).store.n_sink
    bad = [sinks + 4, sinks + 7, sinks + 9]
    for where in range(2):
        tokens = [np.array(part) for part in block(n, layer=layer)]
        tokens[where][:, :, bad, 0] = [np.nan, np.inf, -np.inf]
        keys, values, queries = map(mx.array, tokens)
        for calls in ([n], [1] * n, [12, 1, 1, n - 14]):
            found = positions(fed(method, (keys, values, queries), calls))
            part = ("key", "value")[where]
            _hold(not np.isin(found, bad).any(), f"a row whose {part} is not finite is kept, in calls of {calls}")
            _hold(found.shape[2] == _most_kept(method, layer, n), "a row that is not finite costs others their place")


def ties_do_not_change_the_number(method: Eviction, layer: Layer = LAYER) -> None:
    """Rows that are all alike are kept to exactly the budget."""
    n = _enough(method, layer) + 10
    for dtype in DTYPES:
        keys, values, queries = map(mx.ones_like, block(n, dtype=dtype, layer=layer))
        for calls in ([n], [1] * n):
            kept = positions(fed(method, (keys, values, queries), calls)).shape[2]
            _hold(kept == _most_kept(method, layer, n), f"{kept} rows are kept of {n} that are all alike")


def padding_is_never_kept(method: Eviction, layer: Layer = LAYER) -> None:
    """Tokens past `valid` count for nothing, and what they hold reaches nothing."""
    if method.settings.get("rollback"):
        return
    n = _enough(method, layer)
    real = ((n, n), (9, 1), (1, 0))
    calls = (n, 9, 1)
    tokens = [np.array(part) for part in block(n + 10, batch=2, layer=layer)]
    for part in tokens:
        part[1, :, n + 1 :] = np.nan
    keys, values, queries = map(mx.array, tokens)
    for proxy in (True, False):
        state, start = _begun(method, (keys, values, queries)), 0
        for n_tokens, valid in zip(calls, real, strict=True):
            k, v, q = _cut((keys, values, queries), start, n_tokens)
            state, view = method.update(state, k, v, queries=None if proxy else q, valid=mx.array(valid, mx.int32))
            _hold(not mx.isnan(view[0]).any().item(), "NaN of padding reaches the view")
            start += n_tokens
        _hold(state.store.offset.tolist() == [n + 10, n + 1], f"offset counts padding: {state.store.offset.tolist()}")
        _hold(int(positions(state)[1].max()) <= n, "a row of padding is kept")
        _hold(not mx.isnan(kv(state)[0]).any().item(), "NaN of padding is kept")


def valid_that_counts_every_token_changes_nothing(method: Eviction, layer: Layer = LAYER) -> None:
    """`valid` with all tokens real keeps what no `valid` keeps, padding after it."""
    if method.settings.get("rollback"):
        return
    n = _enough(method, layer)
    tokens = block(n, layer=layer)
    state, start = _begun(method, tokens), 0
    for n_tokens in (12, n - 12):
        keys, values, _ = _cut(tokens, start, n_tokens)
        state, _ = method.update(state, keys, values, valid=mx.array([n_tokens], mx.int32))
        start += n_tokens
    expected = positions(fed(method, tokens, [12, n - 12]))
    n_kept = expected.shape[2]
    _hold(np.array_equal(positions(state)[..., :n_kept], expected), "`valid` of all tokens changes what is kept")
    _hold(bool((positions(state)[..., n_kept:] == -1).all()), "`valid` of all tokens keeps more")


def a_batch_keeps_what_its_sequences_keep_alone(method: Eviction, layer: Layer = LAYER) -> None:
    """Sequences of a batch in lockstep know nothing of each other."""
    n = _enough(method, layer)
    tokens, calls = block(n + 18, batch=3, layer=layer), [n, *[1] * 6, 12]
    together = positions(fed(method, tokens, calls))
    for b in range(3):
        keys, values, queries = (part[b : b + 1] for part in tokens)
        alone = positions(fed(method, (keys, values, queries), calls))
        _hold(np.array_equal(together[b], alone[0]), "a sequence keeps other rows in a batch than alone")


def accounting_counts_kept_rows(method: Eviction, layer: Layer = LAYER) -> None:
    """`kept_bytes` is the kept rows in their dtype, and what the state holds beside its rows."""
    n = _enough(method, layer)
    state = fed(method, block(n + 10, dtype=mx.float16, layer=layer), [n, *[1] * 10])
    width = (layer.head_dim + layer.value_dim) * 2
    rows = layer.n_kv_heads * _most_kept(method, layer, n + 10) * width
    beside = sum(leaf.nbytes for leaf in arrays(state)) - sum(leaf.nbytes for leaf in arrays(state.store))
    _hold(kept_bytes(state) == rows + beside, f"kept_bytes is {kept_bytes(state)}, and not {rows} and {beside}")


def the_kept_set_of_a_static_method_does_not_depend_on_the_calls(
    method: Eviction, layer: Layer = LAYER, calls: Sequence[int] | None = None, seed: int = 0
) -> None:
    """A static method keeps the same rows, bit for bit, in one call, in some, and one token at a time."""
    if not method.static:
        return
    n = 2 * _enough(method, layer)
    some = [[1] * n, [7, *[1] * (n - 7)], [n // 2, 1, 2, n - n // 2 - 3]] if calls is None else [list(calls)]
    for cut in some:
        tokens = block(sum(cut), seed, layer=layer)
        same = same_kept(fed(method, tokens, cut), fed(method, tokens, [sum(cut)]))
        _hold(same, f"calls of {cut} tokens keep other rows than one call; say static=False, or sum in a fixed order")


LAWS: Mapping[str, Law] = MappingProxyType(
    {
        law.__name__: law
        for law in (
            states_are_records,
            the_budget_holds,
            the_offset_counts_tokens,
            kept_rows_are_tokens_in_order,
            the_dtype_stays,
            sinks_and_recent_rows_stay,
            a_block_sees_what_was_kept_and_itself,
            a_state_can_be_forked,
            an_update_traces,
            a_compiled_step_serves_the_next_ones,
            nothing_is_left_unevaluated,
            rows_that_are_not_finite_lose,
            ties_do_not_change_the_number,
            padding_is_never_kept,
            valid_that_counts_every_token_changes_nothing,
            a_batch_keeps_what_its_sequences_keep_alone,
            accounting_counts_kept_rows,
            the_kept_set_of_a_static_method_does_not_depend_on_the_calls,
        )
    }
)
"""The laws by name."""


def _begun(method: Eviction, tokens: Tokens) -> Any:
    keys, values, _ = tokens
    return method.init(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


def _cut(tokens: Tokens, start: int, n_tokens: int) -> Tokens:
    keys, values, queries = (part[:, :, start : start + n_tokens] for part in tokens)
    return keys, values, queries


def _budget(method: Eviction) -> int:
    return int(method.settings["budget"])


def _warm_up(method: Eviction, layer: Layer) -> int:
    """Tokens before which nothing is evicted."""
    return int(_begun(method, block(1, layer=layer)).store.warm_up)


def _most_kept(method: Eviction, layer: Layer, seen: int) -> int:
    return seen if seen < _warm_up(method, layer) else min(_budget(method), seen)


def _enough(method: Eviction, layer: Layer) -> int:
    """Tokens after which rows have left."""
    return max(2 * _budget(method) - 2, _warm_up(method, layer) + 5, 14)


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
    _hold(len(expected) == len(arrays(state)) + 2, "an update changes the number of arrays in the state")
    shapes = [[(leaf.shape, leaf.dtype) for leaf in leaves] for leaves in (found, expected)]
    _hold(shapes[0] == shapes[1], "a compiled update gives other shapes")


def _as_sets(rows: mx.array) -> list[list[bytes]]:
    whole = bits(rows)
    return [sorted(row.tobytes() for row in head) for head in whole.reshape(-1, *whole.shape[2:])]


def _hold(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)

"""Laws of the rows that a method keeps and shows."""

import mlx.core as mx
import numpy as np

from velox_fn.engine.eviction import Eviction, kept_bytes, kept_positions, kv
from velox_fn.engine.records import arrays
from velox_fn.testing.trials import (
    DTYPES,
    LAYER,
    Layer,
    begun,
    bits,
    block,
    budget_of,
    cut_out,
    enough,
    fed,
    hold,
    most_kept,
    positions,
    proxies,
)


def the_budget_holds(method: Eviction, layer: Layer = LAYER) -> None:
    """As many rows as the budget says are kept, whatever the calls."""
    budget, n_over = budget_of(method), enough(method, layer)
    calls = (1, 4, 3, 1, 1, n_over + 257, 1, 1, 2)
    for proxy in (True, False):  # whoever reads no queries is given them all the same
        tokens = block(sum(calls), layer=layer)
        state, seen = begun(method, tokens), 0
        for n_tokens in calls:
            keys, values, queries = cut_out(tokens, seen, n_tokens)
            state, _ = method.update(state, keys, values, queries=None if proxy else queries)
            seen += n_tokens
            expected = most_kept(method, layer, seen)
            hold(
                positions(state).shape[2] == expected,
                f"after {seen} tokens {positions(state).shape[2]} rows are kept under a budget of {budget}, and not "
                f"{expected}",
            )


def the_offset_counts_tokens(method: Eviction, layer: Layer = LAYER) -> None:
    """`offset` is the tokens seen, not the rows kept."""
    n = 2 * enough(method, layer)
    for calls in ([1] * n, [n // 2, 1, 1, n - n // 2 - 2]):
        offset = fed(method, block(n, layer=layer), calls).store.offset.tolist()
        hold(offset == [n], f"offset is {offset} after {n} tokens")


def kept_rows_are_tokens_in_order(method: Eviction, layer: Layer = LAYER) -> None:
    """A kept row is a token's, bit for bit, at its position, and rows stand in temporal order."""
    n = enough(method, layer)
    for proxy in proxies(method):
        tokens = block(n + 40, seed=1, layer=layer)
        state = fed(method, tokens, [n, 1, 1, 1, 20, *[1] * 17], proxy=proxy)
        at = kept_positions(state)
        hold(bool((np.diff(positions(state)) > 0).all()), "kept rows do not stand in temporal order")
        for kept, given, what in zip(kv(state), tokens[:2], ("keys", "values"), strict=True):
            own = mx.take_along_axis(given, at[..., None], axis=2)
            hold(np.array_equal(bits(kept), bits(own)), f"kept {what} are not those of the tokens there")


def the_dtype_stays(method: Eviction, layer: Layer = LAYER) -> None:
    """Keys and values keep the model's own dtype and width."""
    n = enough(method, layer)
    for dtype in DTYPES:
        keys, values = kv(fed(method, block(n + 10, dtype=dtype, layer=layer), [n, 1, 1, 8]))
        hold((keys.dtype, values.dtype) == (dtype, dtype), f"{dtype} rows became {keys.dtype}, {values.dtype}")
        widths = (keys.shape[3], values.shape[3])
        hold(widths == (layer.head_dim, layer.value_dim), f"rows are {widths} wide")


def sinks_and_recent_rows_stay(method: Eviction, layer: Layer = LAYER) -> None:
    """The first `n_sink` and the last `recent` positions are kept."""
    n = enough(method, layer) + 10
    for calls in ([n], [n - 1, 1], [1] * n):
        state = fed(method, block(n, layer=layer), calls)
        found, store = positions(state), state.store
        hold(bool((found[..., : store.n_sink] == np.arange(store.n_sink)).all()), "a sink has left")
        last = np.arange(n - store.recent, n)
        hold(bool((found[..., found.shape[2] - store.recent :] == last).all()), "a recent row has left")


def a_block_sees_what_was_kept_and_itself(method: Eviction, layer: Layer = LAYER) -> None:
    """The view is the rows kept before the call and the block, which nothing leaves before it has attended."""
    n = enough(method, layer)
    tokens = block(n + 12, layer=layer)
    for proxy in proxies(method):
        keys, values, queries = cut_out(tokens, 0, n)
        _, view = method.update(begun(method, tokens), keys, values, queries=None if proxy else queries)
        for seen, given in zip(view, (keys, values), strict=True):
            hold(np.array_equal(bits(seen), bits(given)), "the first block does not see itself and nothing else")
    if method.shown is not None:  # attention sees other rows than are stored
        return
    for calls in ([n // 2], [n], [n, 1, 1], [n, 1, 1, 1]):
        before = fed(method, tokens, calls)
        for n_tokens in (1, 9):
            new = cut_out(tokens, sum(calls), n_tokens)[:2]
            _, view = method.update(before, *new)
            for seen, kept, given in zip(view, kv(before), new, strict=True):
                whole = mx.concatenate([kept, given], axis=2)
                hold(_as_sets(seen) == _as_sets(whole), f"{n_tokens} tokens see other rows than those kept and theirs")
                last = seen[:, :, kept.shape[2] :]
                hold(n_tokens == 1 or np.array_equal(bits(last), bits(given)), "a block does not stand last, in order")


def rows_that_are_not_finite_lose(method: Eviction, layer: Layer = LAYER) -> None:
    """NaN or infinity in a key or value costs that row its place, and nothing else."""
    n = enough(method, layer) + 10
    sinks = begun(method, block(1, layer=layer)).store.n_sink
    bad = [sinks + 4, sinks + 7, sinks + 9]
    for where in range(2):
        tokens = [np.array(part) for part in block(n, layer=layer)]
        tokens[where][:, :, bad, 0] = [np.nan, np.inf, -np.inf]
        keys, values, queries = map(mx.array, tokens)
        for calls in ([n], [1] * n, [12, 1, 1, n - 14]):
            found = positions(fed(method, (keys, values, queries), calls))
            part = ("key", "value")[where]
            hold(not np.isin(found, bad).any(), f"a row whose {part} is not finite is kept, in calls of {calls}")
            hold(found.shape[2] == most_kept(method, layer, n), "a row that is not finite costs others their place")


def ties_do_not_change_the_number(method: Eviction, layer: Layer = LAYER) -> None:
    """Rows that are all alike are kept to exactly the budget."""
    n = enough(method, layer) + 10
    for dtype in DTYPES:
        keys, values, queries = map(mx.ones_like, block(n, dtype=dtype, layer=layer))
        for calls in ([n], [1] * n):
            kept = positions(fed(method, (keys, values, queries), calls)).shape[2]
            hold(kept == most_kept(method, layer, n), f"{kept} rows are kept of {n} that are all alike")


def accounting_counts_kept_rows(method: Eviction, layer: Layer = LAYER) -> None:
    """`kept_bytes` is the kept rows in their dtype, and what the state holds beside its rows."""
    n = enough(method, layer)
    state = fed(method, block(n + 10, dtype=mx.float16, layer=layer), [n, *[1] * 10])
    width = (layer.head_dim + layer.value_dim) * 2
    rows = layer.n_kv_heads * most_kept(method, layer, n + 10) * width
    beside = sum(leaf.nbytes for leaf in arrays(state)) - sum(leaf.nbytes for leaf in arrays(state.store))
    hold(kept_bytes(state) == rows + beside, f"kept_bytes is {kept_bytes(state)}, and not {rows} and {beside}")


def _as_sets(rows: mx.array) -> list[list[bytes]]:
    whole = bits(rows)
    return [sorted(row.tobytes() for row in head) for head in whole.reshape(-1, *whole.shape[2:])]

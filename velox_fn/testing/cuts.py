"""Laws of how tokens are cut into calls and put together in batches."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from velox_fn.engine.eviction import Eviction, kv
from velox_fn.testing.trials import (
    LAYER,
    Layer,
    begun,
    block,
    cut_out,
    enough,
    fed,
    hold,
    positions,
    proxies,
    same_kept,
)


def padding_is_never_kept(method: Eviction, layer: Layer = LAYER) -> None:
    """Tokens past `valid` count for nothing, and what they hold reaches nothing."""
    if method.settings.get("rollback"):
        return
    n = enough(method, layer)
    real = ((n, n), (9, 1), (1, 0))
    calls = (n, 9, 1)
    tokens = [np.array(part) for part in block(n + 10, batch=2, layer=layer)]
    for part in tokens:
        part[1, :, n + 1 :] = np.nan
    keys, values, queries = map(mx.array, tokens)
    for proxy in proxies(method):
        state, start = begun(method, (keys, values, queries)), 0
        for n_tokens, valid in zip(calls, real, strict=True):
            k, v, q = cut_out((keys, values, queries), start, n_tokens)
            state, view = method.update(state, k, v, queries=None if proxy else q, valid=mx.array(valid, mx.int32))
            hold(not mx.isnan(view[0]).any().item(), "NaN of padding reaches the view")
            start += n_tokens
        hold(state.store.offset.tolist() == [n + 10, n + 1], f"offset counts padding: {state.store.offset.tolist()}")
        hold(int(positions(state)[1].max()) <= n, "a row of padding is kept")
        hold(not mx.isnan(kv(state)[0]).any().item(), "NaN of padding is kept")


def valid_that_counts_every_token_changes_nothing(method: Eviction, layer: Layer = LAYER) -> None:
    """`valid` with all tokens real keeps what no `valid` keeps, padding after it."""
    if method.settings.get("rollback"):
        return
    n = enough(method, layer)
    tokens = block(n, layer=layer)
    state, start = begun(method, tokens), 0
    for n_tokens in (12, n - 12):
        keys, values, _ = cut_out(tokens, start, n_tokens)
        state, _ = method.update(state, keys, values, valid=mx.array([n_tokens], mx.int32))
        start += n_tokens
    expected = positions(fed(method, tokens, [12, n - 12]))
    n_kept = expected.shape[2]
    hold(np.array_equal(positions(state)[..., :n_kept], expected), "`valid` of all tokens changes what is kept")
    hold(bool((positions(state)[..., n_kept:] == -1).all()), "`valid` of all tokens keeps more")


def a_batch_keeps_what_its_sequences_keep_alone(method: Eviction, layer: Layer = LAYER) -> None:
    """Sequences of a batch in lockstep know nothing of each other."""
    n = enough(method, layer)
    tokens, calls = block(n + 18, batch=3, layer=layer), [n, *[1] * 6, 12]
    together = positions(fed(method, tokens, calls))
    for b in range(3):
        keys, values, queries = (part[b : b + 1] for part in tokens)
        alone = positions(fed(method, (keys, values, queries), calls))
        hold(np.array_equal(together[b], alone[0]), "a sequence keeps other rows in a batch than alone")


def the_kept_set_of_a_static_method_does_not_depend_on_the_calls(
    method: Eviction, layer: Layer = LAYER, calls: Sequence[int] | None = None, seed: int = 0
) -> None:
    """A static method keeps the same rows, bit for bit, in one call, in some, and one token at a time."""
    if not method.static:
        return
    n = 2 * enough(method, layer)
    some = [[1] * n, [7, *[1] * (n - 7)], [n // 2, 1, 2, n - n // 2 - 3]] if calls is None else [list(calls)]
    for cut in some:
        tokens = block(sum(cut), seed, layer=layer)
        same = same_kept(fed(method, tokens, cut), fed(method, tokens, [sum(cut)]))
        hold(same, f"calls of {cut} tokens keep other rows than one call; say static=False, or sum in a fixed order")

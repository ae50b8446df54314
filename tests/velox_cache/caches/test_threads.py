"""What one thread did to a cache, another goes on with: bookkeeping leaves no work behind.

MLX computes an array on a stream of the thread that asked for it, and a thread-local stream, such as mlx_lm generates
on, is there for no other thread. So a call that mlx_lm's caches answer without touching an array must not either.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibrated import needed_arrays
from mlx_lm.models.cache import KVCache

from velox_cache import EvictingKVCache
from velox_fn import METHODS, qfilters
from velox_fn.registry import method_factory

BUDGET = 40
CALLS: dict[str, Callable[[Any], Any]] = {
    "size": lambda cache: cache.size(),
    "empty": lambda cache: cache.empty(),
    "nbytes": lambda cache: cache.nbytes,
    "offset": lambda cache: cache.offset,
    "is_trimmable": lambda cache: cache.is_trimmable(),
    "trim": lambda cache: cache.trim(2),
    "mask of one token": lambda cache: cache.make_mask(1, return_array=False, window_size=None),
    "mask of a block": lambda cache: cache.make_mask(3, return_array=False, window_size=None),
    "state": lambda cache: cache.state,
}
REMADE: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "from_state": lambda cache: type(cache).from_state(cache.state),
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}
OURS_ALONE: dict[str, Callable[[Any], Any]] = {
    "prepare": lambda cache: cache.prepare(lengths=[3], right_padding=[0]),
    "finalize": lambda cache: cache.finalize(),
    "tokens_kept": lambda cache: cache.tokens_kept,
    "kept_bytes": lambda cache: cache.kept_bytes,
}


InAThread = Callable[[Callable[[], Any]], Any]
"""What some work returns, or raises, in one certain thread."""


@contextmanager
def thread_with_a_stream() -> Iterator[InAThread]:
    """A thread that computes on a stream of its own."""
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(mx.new_thread_local_stream, mx.cpu).result()

        def on_the_stream(work: Callable[[], Any]) -> Any:
            with mx.stream(stream):
                return work()

        yield lambda work: pool.submit(on_the_stream, work).result()
        pool.submit(mx.clear_streams).result()  # one that outlives its thread may abort the process when it ends


@pytest.fixture(scope="module")
def threads() -> Iterator[tuple[InAThread, InAThread]]:
    """Two threads, the same for all tests: MLX forgets no stream, and waits for every one that there ever was."""
    with thread_with_a_stream() as first, thread_with_a_stream() as second:
        yield first, second


def read(cache: Any, n_tokens: int, seed: int) -> None:
    """Take tokens in and evaluate what attention makes of the view, which is all that generation evaluates."""
    block = mx.array(np.random.default_rng(seed).standard_normal((1, 2, n_tokens, 8)).astype(np.float32))
    keys, values = cache.update_and_fetch(block, block)
    mx.eval(keys.sum() + values.sum())


def called_in_one_thread_and_continued_in_another(
    threads: tuple[InAThread, InAThread], make: Callable[[], Any], n_tokens: int, call: Any
) -> None:
    def first() -> Any:
        cache = make()
        for seed, count in enumerate((n_tokens, 1, 1)):
            read(cache, count, seed)
        return call(cache)

    def second() -> None:
        for seed, count in enumerate((1, 3, 1)):
            read(cache, count, 10 + seed)
        mx.eval([part for part in cache.state if isinstance(part, mx.array)])

    cache = threads[0](first)
    threads[1](second)


def evicting(name: str, **settings: Any) -> Callable[[], EvictingKVCache]:
    return lambda: EvictingKVCache(method_factory(name)(budget=BUDGET, **needed_arrays(name), **settings))


CACHES: dict[str, Callable[[], Any]] = {"plain": KVCache} | {name: evicting(name) for name in METHODS}
CACHES["qfilters rollback"] = evicting("qfilters", rollback=4)
CACHES["calibrated rollback"] = lambda: EvictingKVCache(
    qfilters(budget=BUDGET, recent=3, rollback=4, filters=mx.ones((2, 8)))
)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("n_tokens", [10, BUDGET - 2, 60], ids=lambda n: f"{n} tokens")
def test_bookkeeping_leaves_nothing_for_another_thread(
    threads: tuple[InAThread, InAThread], name: str, n_tokens: int
) -> None:
    calls = {label: lambda cache, call=call: (call(cache), cache)[1] for label, call in CALLS.items()}
    if name != "plain":
        calls |= {label: lambda cache, call=call: (call(cache), cache)[1] for label, call in OURS_ALONE.items()}
    for label, call in (calls | REMADE).items():
        try:
            called_in_one_thread_and_continued_in_another(threads, CACHES[name], n_tokens, call)
        except RuntimeError as error:
            pytest.fail(f"after {label}: {error}")


def test_what_the_other_thread_would_say(threads: tuple[InAThread, InAThread]) -> None:
    # Otherwise the test above could not fail.
    lazy = threads[0](lambda: mx.ones((2,)) * 2)
    with pytest.raises(RuntimeError, match="no Stream"):
        threads[1](lambda: mx.eval(lazy))

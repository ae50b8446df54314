"""Small timings of one machine, for `velox doctor`: medians of a few repeats. The benchmark is `velox bench`."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import mlx.core as mx

from metal_src import metal_available
from velox_fn import fused_evict, qfilters

SETTING = "float16, 8 heads of 128, budget 512; blocks of 1024 rows"
_H, _D, _BUDGET, _ROWS = 8, 128, 512, 1024


def matrix_product_gflops(size: int = 512) -> float:
    """Speed of a square float32 matrix product, in 10^9 operations a second. It depends on the BLAS in use."""
    square = mx.random.normal((size, size))
    mx.eval(square)
    return 2 * size**3 / _median_seconds(lambda: mx.eval(square @ square), 5) / 1e9


def block_eviction_ms() -> list[tuple[str, float]]:
    """Milliseconds to evict one block, for each backend that runs here."""
    keys, values = _block(_ROWS)
    scores = mx.random.normal((1, _H, _ROWS))
    positions = mx.broadcast_to(mx.arange(_ROWS, dtype=mx.int32), (1, _H, _ROWS))
    mx.eval(scores, positions)

    def evict(metal: bool) -> None:
        mx.eval(fused_evict(keys, values, scores, positions, budget=_BUDGET, use_metal_kernels=metal))

    backends = [("MLX operations", False)] + ([("Metal kernels", True)] if metal_available() else [])
    return [(name, 1e3 * _median_seconds(partial(evict, metal), 10)) for name, metal in backends]


def decode_step_ms() -> float:
    """Milliseconds of one Q-Filters step over budget, evaluated alone."""
    method = qfilters(budget=_BUDGET, recent=32, filters=mx.random.normal((_H, _D)))
    state, view = method.update(method.init(1, _H, _D, _D, mx.float16), *_block(_BUDGET + 1))
    mx.eval(view)
    del view  # while a view is held, a step copies the buffers instead of writing one row
    keys, values = _block(1)

    def step() -> None:
        nonlocal state
        state, view = method.update(state, keys, values)
        mx.eval(view)

    return 1e3 * _median_seconds(step, 20)


def _block(n_tokens: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, _H, n_tokens, _D)).astype(mx.float16)
    values = mx.random.normal((1, _H, n_tokens, _D)).astype(mx.float16)
    mx.eval(keys, values)
    return keys, values


def _median_seconds(call: Callable[[], None], times: int) -> float:
    call()  # the first call compiles
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)

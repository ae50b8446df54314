"""Launches the Metal kernels: the only place where Python meets ``*.metal``.

Evicting a block on an Apple GPU is two dispatches around one sort: :func:`qfilters_score` ranks the rows,
:func:`threshold_and_quota` finds the cut with ordinary MLX operations, :func:`evict_apply` copies the survivors.
Nothing here reads an array on the host, so the calls stay lazy.

The kernels are tested by running the source that MLX generates on the CPU (``tests/metal_emulator``). The project has
not compiled them with Apple's compiler nor measured them on Apple hardware; see ``docs/metal.md``.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import NamedTuple, cast

import mlx.core as mx

SIMD_WIDTH = 32
MAX_ROWS = 2**26 - 32  # 32 lanes per row, in whole threadgroups, must stay below 2^31: MLX's grids are ints
KEY_DTYPES = (mx.float32, mx.float16, mx.bfloat16)

_Kernel = Callable[..., list[mx.array]]


class Cut(NamedTuple):
    """Where eviction cuts each head: what :func:`threshold_and_quota` finds and :func:`evict_apply` obeys."""

    threshold: mx.array  # float32 [B,H]: real rows ranked above it always stay
    tie_quota: mx.array  # int32 [B,H]: how many real rows ranked equal to it stay, lowest position first
    padding_quota: mx.array  # int32 [B,H]: how many padding rows fill what real rows leave


def metal_available() -> bool:
    """Whether the kernels can run now: MLX has a Metal backend and the default device is the GPU."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


@cache
def kernel_failure() -> str | None:
    """What stops the kernels from compiling and running here, in MLX's words; None when they run.

    Tries both once on one row, and warns if that fails. For construction time only: it waits for the device.
    """
    row, one = mx.ones((1, 1, 1, 1)), mx.ones((1, 1, 1))
    position, offset = mx.zeros((1, 1, 1), mx.int32), mx.ones((1,), mx.int32)
    try:
        ranks = qfilters_score(row, row, one, position, offset, n_sink=0, recent=0, sign=1)
        cut = threshold_and_quota(ranks, position, 1)
        mx.eval(evict_apply(row, row, ranks, ranks, position, cut, keep=1))
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"the Metal kernels do not run here, MLX operations take their place; see `velox doctor`: {error}",
            stacklevel=2,
        )
        return str(error)
    return None


def qfilters_score(
    keys: mx.array,
    values: mx.array,
    filters: mx.array,
    positions: mx.array,
    offset: mx.array,
    *,
    n_sink: int,
    recent: int,
    sign: int,
    threads: int = 256,
) -> mx.array:
    """Q-Filters ranking value ``sign * <filter, key>`` of every row, float32, in one dispatch.

    The sum runs in one order that depends on D alone (32 strided partial sums, then a halving tree), without fused
    multiply-adds, whatever the block size and the key dtype.

    What a row gets, first rule that applies:

    - padding (position -1): ``-inf``. It loses by its position; the value only has to be finite or ``-inf``.
    - sink (``position < n_sink``) or recent (``recent > 0`` and ``position >= offset - recent``): ``+inf``.
    - non-finite score, or any non-finite element in its key or value: ``-inf``.
    - otherwise the score, ``-0.0`` as ``+0.0``.

    Scores are stored once and the recent window slides, so stored scores are made with ``recent=0`` and the window is
    applied to them afterwards: ``mx.where(positions >= offset - recent, inf, scores)``.

    Args:
        keys: ``[B,H,n,D]``, float32, float16 or bfloat16.
        values: ``[B,H,n,D_v]``, the same dtypes.
        filters: float32 ``[B,H,D]``, one direction per (sequence, kv head).
        positions: int32 ``[B,H,n]``, absolute; -1 marks padding.
        offset: int32 ``[B]``, tokens seen, this block included.
        n_sink: rows at positions below it are protected.
        recent: rows at the last ``recent`` positions are protected; 0 protects none.
        sign: +1 or -1.
        threads: threads per threadgroup, a multiple of 32 up to 1024; it does not change a bit of the result.

    Returns:
        float32 ``[B,H,n]``.

    Raises:
        ValueError: a shape, dtype or setting that does not fit.
        RuntimeError: MLX has no Metal backend.
    """
    B, H, n, D = _check_rows(keys, values, threads)
    _check("filters", filters, (B, H, D), mx.float32)
    _check("positions", positions, (B, H, n), mx.int32)
    _check("offset", offset, (B,), mx.int32)
    if sign not in (1, -1):
        raise ValueError(f"sign must be +1 or -1, got {sign}: it states which end of the filter attracts queries.")
    rows_per_group = threads // SIMD_WIDTH
    (ranks,) = _score_kernel()(
        inputs=[keys, values, filters, positions, offset, mx.array([n_sink, recent, sign], mx.int32)],
        grid=(-(-n // rows_per_group) * threads, B * H, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, H, n)],
        output_dtypes=[mx.float32],
    )
    return ranks


def threshold_and_quota(ranks: mx.array, positions: mx.array, keep: int) -> Cut:
    """The selection rule as a cut, for rows that stand in temporal order: exactly ``keep`` rows survive it.

    Higher rank first; among equals the lower position; padding after every real row. Pure MLX, no host sync.

    Args:
        ranks: float32 ``[B,H,n]``, +inf for protected rows, -inf for non-finite ones, never NaN nor -0.0.
        positions: int32 ``[B,H,n]``, ascending over the real rows; -1 marks padding.
        keep: rows to keep per head, ``1 <= keep <= n``.

    Raises:
        ValueError: ``keep`` outside that range.
    """
    n = ranks.shape[-1]
    if not 1 <= keep <= n:
        raise ValueError(f"keep must lie in 1..{n}, the number of rows, got {keep}: evict only when rows exceed it.")
    real = positions >= 0
    competing = mx.where(real, ranks, -mx.inf)
    threshold = mx.sort(competing, axis=-1)[..., n - keep]
    above = mx.sum(real & (ranks > threshold[..., None]), axis=-1)
    padding_quota = mx.maximum(keep - mx.sum(real, axis=-1), 0)
    return Cut(threshold, keep - padding_quota - above, padding_quota)


def evict_apply(
    keys: mx.array,
    values: mx.array,
    scores: mx.array,
    ranks: mx.array,
    positions: mx.array,
    cut: Cut,
    *,
    keep: int,
    threads: int = 256,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The ``keep`` surviving rows of every head, bit for bit and in temporal order, in one dispatch.

    Rows must stand in temporal order (ascending positions over the real rows; padding anywhere). The survivors' real
    rows come first, padding last. There is no bound on n or keep.

    Args:
        keys: ``[B,H,n,D]``, float32, float16 or bfloat16.
        values: ``[B,H,n,D_v]``, the same dtypes.
        scores: float32 ``[B,H,n]``, stored scores, copied along.
        ranks: float32 ``[B,H,n]``, what the rows compete with.
        positions: int32 ``[B,H,n]``, copied along.
        cut: from :func:`threshold_and_quota` for these ranks, positions and ``keep``. A cut from anywhere else leaves
            output rows unwritten or writes past them: the kernel trusts it.
        keep: rows to keep per head, ``1 <= keep <= n``.
        threads: threads per threadgroup, a multiple of 32 up to 1024; it does not change a bit of the result.

    Returns:
        keys ``[B,H,keep,D]``, values ``[B,H,keep,D_v]``, scores and positions ``[B,H,keep]``, dtypes as given.

    Raises:
        ValueError: a shape, dtype or ``keep`` that does not fit.
        RuntimeError: MLX has no Metal backend.
    """
    B, H, n, D = _check_rows(keys, values, threads)
    for name, array, dtype in (("scores", scores, mx.float32), ("ranks", ranks, mx.float32)):
        _check(name, array, (B, H, n), dtype)
    _check("positions", positions, (B, H, n), mx.int32)
    for name, array, dtype in zip(Cut._fields, cut, (mx.float32, mx.int32, mx.int32), strict=True):
        _check(f"cut.{name}", array, (B, H), dtype)
    if not 1 <= keep <= n:
        raise ValueError(f"keep must lie in 1..{n}, the number of rows, got {keep}: evict only when rows exceed it.")
    kept = _evict_kernel()(
        inputs=[keys, values, scores, ranks, positions, *cut, mx.array(keep, mx.int32)],
        template=[("TG", threads)],
        grid=(threads, B * H, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, H, keep, D), (B, H, keep, values.shape[3]), (B, H, keep), (B, H, keep)],
        output_dtypes=[keys.dtype, values.dtype, mx.float32, mx.int32],
    )
    return kept[0], kept[1], kept[2], kept[3]


def _check_rows(keys: mx.array, values: mx.array, threads: int) -> tuple[int, int, int, int]:
    for name, rows in (("keys", keys), ("values", values)):
        if rows.ndim != 4 or 0 in rows.shape:
            raise ValueError(f"{name} must have shape [B,H,n,D] with no empty axis, got {list(rows.shape)}.")
        if rows.dtype not in KEY_DTYPES:
            raise ValueError(
                f"{name} must be float32, float16 or bfloat16, got {rows.dtype}: the kernels know no other."
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} must agree in B, H and n.")
    if keys.shape[2] > MAX_ROWS:
        raise ValueError(
            f"keys hold {keys.shape[2]} rows per head; one dispatch takes at most {MAX_ROWS}. Evict earlier."
        )
    if threads % SIMD_WIDTH or not SIMD_WIDTH <= threads <= 1024:
        raise ValueError(f"threads must be a multiple of {SIMD_WIDTH} up to 1024, got {threads}: simdgroups are whole.")
    B, H, n, D = keys.shape
    return B, H, n, D


def _check(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} of shape {list(shape)} to go with these keys, "
            f"got {array.dtype} of shape {list(array.shape)}."
        )


@cache
def _score_kernel() -> _Kernel:
    names = ["keys", "values", "filters", "positions", "offset", "settings"]
    return _kernel("qfilters_score", names, ["ranks"])


@cache
def _evict_kernel() -> _Kernel:
    names = ["keys", "values", "scores", "ranks", "positions", *Cut._fields, "keep"]
    return _kernel("qfilters_evict_apply", names, ["kept_keys", "kept_values", "kept_scores", "kept_positions"])


def _kernel(name: str, input_names: list[str], output_names: list[str]) -> _Kernel:
    source = files("metal_src").joinpath(f"{name}.metal").read_text(encoding="utf-8")
    return cast(_Kernel, mx.fast.metal_kernel(name, input_names, output_names, source))

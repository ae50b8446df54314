"""Does the kept set depend on how tokens are split into calls? Run as a script, so that a BLAS can be preloaded.

Prints as JSON how many kept sets depend on the split.
"""

import json

import mlx.core as mx
import numpy as np

from velox_fn import Eviction, fusion, kept_positions, qfilters

H, D, N = 4, 64, 300


def near_ties(seed: int) -> tuple[mx.array, mx.array]:
    """Keys [1,H,N,D] whose projections on filters [H,D] crowd within a few ulp, and the filters."""
    rng = np.random.default_rng(seed)
    filters = rng.standard_normal((H, D)).astype(np.float32)
    keys = np.broadcast_to(rng.standard_normal((1, H, 1, D)), (1, H, N, D)).astype(np.float32)
    at = rng.integers(D, size=(1, H, N, 1))
    nudged = np.nextafter(np.take_along_axis(keys, at, -1), np.float32(np.inf))
    keys = keys.copy()
    np.put_along_axis(keys, at, nudged, -1)
    return mx.array(keys), mx.array(filters)


def methods(filters: mx.array, recent: int) -> list[Eviction]:
    """Q-Filters, and a fusion that also projects on the mirror images of the filters."""
    moments = {"means": mx.zeros((H, 3)), "deviations": mx.ones((H, 3))}
    return [
        qfilters(budget=80, recent=recent, filters=filters),
        fusion(budget=80, recent=recent, filters=filters, mean_keys=filters[:, ::-1], **moments),
    ]


def kept(method: Eviction, keys: mx.array, calls: list[int]) -> np.ndarray:
    state = method.init(1, H, D, D, keys.dtype)
    start = 0
    for n_tokens in calls:
        block = keys[:, :, start : start + n_tokens]
        state, _ = method.update(state, block, block)
        start += n_tokens
    return np.array(kept_positions(state))


def main() -> None:
    splits = [[N], [1] * N, [128, 128, 44], [7] * 42 + [6], [299, 1]]
    changed = 0
    keys, filters = near_ties(0)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for method in [*methods(filters, 0), *methods(filters, 20)]:
            whole = kept(method, keys.astype(dtype), splits[0])
            changed += sum((kept(method, keys.astype(dtype), calls) != whole).any() for calls in splits[1:])
    print(json.dumps({"changed": int(changed)}))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main()

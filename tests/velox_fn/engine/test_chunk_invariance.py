"""The kept set of Q-Filters does not depend on how tokens are split into calls, in any bit, under any BLAS."""

import ctypes.util
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from chunk_check import D, kept, near_ties
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_fn import kept_positions, kv, qfilters
from velox_fn.engine.select import Scores
from velox_fn.engine.static import static_eviction

ROOT = Path(__file__).parents[3]
CHECK = ROOT / "tests" / "support" / "chunk_check.py"


def fed(method, keys, calls):
    state = method.init(*(1, keys.shape[1], keys.shape[3], keys.shape[3], keys.dtype))
    start = 0
    for n_tokens in calls:
        block = keys[:, :, start : start + n_tokens]
        state, _ = method.update(state, block, block)
        start += n_tokens
    return state


@pytest.mark.parametrize("recent", [0, 7])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@given(cuts=st.sets(st.integers(1, 99), max_size=20), seed=st.integers(0, 2**16))
@settings(max_examples=12)
def test_any_split_keeps_the_same_rows_bit_for_bit_though_scores_are_one_ulp_apart(recent, dtype, cuts, seed):
    keys, filters = near_ties(seed)
    keys = keys[:, :, :100].astype(dtype)
    method = qfilters(budget=30, recent=recent, filters=filters)
    split, whole = fed(method, keys, np.diff([0, *sorted(cuts), 100]).tolist()), fed(method, keys, [100])
    np.testing.assert_array_equal(np.array(kept_positions(split)), np.array(kept_positions(whole)))
    for one, other in zip(kv(split), kv(whole), strict=True):
        np.testing.assert_array_equal(np.array(one.view(mx.uint16)), np.array(other.view(mx.uint16)))


def test_near_ties_are_near():
    # The tests above say something only if scores crowd: a few ulp between them, and many equal.
    keys, filters = near_ties(0)
    scores = np.array((keys * filters[:, None]).sum(-1))[0]
    assert (np.ptp(scores, axis=-1) < 64 * np.spacing(np.abs(scores).max())).all()


@pytest.mark.parametrize("dim", [1, 3, 8, 24, 64, 80, 128, 256])
def test_a_projection_does_not_depend_on_its_neighbours_or_on_memory_layout(dim):
    rng = np.random.default_rng(dim)
    keys = rng.standard_normal((2, 3, 65, dim)).astype(np.float32)
    filters = mx.array(rng.standard_normal((2, 3, 1, dim)).astype(np.float32))
    one_by_one = [np.array((mx.array(keys[:, :, i : i + 1]) * filters).sum(-1)) for i in range(65)]
    expected = np.concatenate(one_by_one, axis=-1)
    token_major = mx.array(np.ascontiguousarray(keys.swapaxes(1, 2))).swapaxes(1, 2)  # as models make them
    sliced = mx.array(np.concatenate([keys, keys], axis=-1))[..., :dim]
    for laid_out in (mx.array(keys), token_major, sliced):
        np.testing.assert_array_equal(np.array((laid_out * filters).sum(-1)), expected)


def libraries():
    """BLAS libraries that can be preloaded here, by name."""
    openblas = ctypes.util.find_library("openblas")
    mkl = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    return {"openblas": openblas, "mkl": str(mkl[0]) if mkl else None}


def checked_under(blas):
    library = libraries()[blas]
    if library is None or not sys.platform.startswith("linux"):
        pytest.skip(f"{blas} is not installed, or cannot be preloaded here")
    environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_kept_set_does_not_depend_on_the_split_under_openblas():
    assert checked_under("openblas")["changed"] == 0


def test_kept_set_does_not_depend_on_the_split_under_mkl():
    assert checked_under("mkl")["changed"] == 0


def product_that_sums_otherwise(keys, values, positions, params):
    """Projections as a matrix product may give them: one row is summed from the front, several from the back."""
    order = range(D) if keys.shape[2] == 1 else reversed(range(D))
    products = keys * params[0][:, :, None]
    return Scores(sum((products[..., d] for d in order), mx.zeros(keys.shape[:3])), unseen=())


def test_a_product_that_sums_otherwise_would_depend_on_the_split():
    # Why scores are no matrix product: BLAS may sum one row in another order than several. Whether one does is its own
    # affair, and that of the processor; this one does.
    keys, filters = near_ties(0)
    naive = static_eviction(
        "naive", product_that_sums_otherwise, budget=30, n_sink=4, recent=0, params={"filters": filters}
    )
    split, whole = kept(naive, keys[:, :, :100], [1] * 100), kept(naive, keys[:, :, :100], [100])
    assert (split != whole).any()

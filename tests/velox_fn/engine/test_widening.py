"""Widening changes no number."""

import mlx.core as mx
import numpy as np
import pytest

from velox_fn.engine.widening import widened

HALVES = np.arange(2**16, dtype=np.uint16)  # every float16 and bfloat16 there is


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [slice(None), slice(0, 100)], ids=["whole", "a part of each row"])
def test_every_half_keeps_its_number_and_sign(dtype, columns):
    halves = HALVES.reshape(256, 256)[:, columns]
    rows = mx.array(HALVES).view(dtype).reshape(256, 256)[:, columns]
    if dtype == mx.float16:
        exact = halves.view(np.float16).astype(np.float32)
    else:
        exact = (halves.astype(np.uint32) << 16).view(np.float32)
    found = np.array(widened(rows))
    numbers = ~np.isnan(exact)
    assert found.dtype == np.float32
    assert np.isnan(found[~numbers]).all()
    np.testing.assert_array_equal(found[numbers].view(np.uint32), exact[numbers].view(np.uint32))

"""Rows stored as mx.quantize makes them: their bytes, attention over them, and what is refused."""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_fn import attend, dequantised, kept_bytes, quantised
from velox_fn.registry import BUILT_IN
from velox_fn.testing import Layer, block, fed
from velox_fn.testing.trials import cut_out

WIDTHS = ((8, 8), (8, 4), (None, 2), (3, None))
tokens_of = functools.partial(block, layer=Layer(head_dim=32, value_dim=64))


@pytest.mark.parametrize(("key_bits", "value_bits"), WIDTHS)
def test_bytes_are_those_of_the_stored_arrays(key_bits: int | None, value_bits: int | None) -> None:
    method = quantised(BUILT_IN["l2norm"].make(budget=16), key_bits=key_bits, value_bits=value_bits, group_size=32)
    state = fed(method, tokens_of(50, dtype=mx.float16), [40, *[1] * 10])

    def row(width: int, n_bits: int | None) -> float:
        return width * 2 if n_bits is None else width * n_bits / 8 + 4 * width / 32

    assert kept_bytes(state) == 2 * 16 * (row(32, key_bits) + row(64, value_bits))


@pytest.mark.parametrize(("key_bits", "value_bits"), WIDTHS)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("masked", ["none", "causal", "bool", "numbers"])
def test_attention_is_that_over_the_rows_read_back(
    key_bits: int | None, value_bits: int | None, with_sinks: bool, masked: str
) -> None:
    method = quantised(BUILT_IN["l2norm"].make(budget=16), key_bits=key_bits, value_bits=value_bits, group_size=32)
    tokens = tokens_of(60, batch=2)
    state = fed(method, tokens, [40, *[1] * 19])
    keys, values, queries = cut_out(tokens, 59, 1)
    state, view = method.update(state, keys, values)
    rng = np.random.default_rng(0)
    n_rows = 17
    shown = rng.random((2, 1, 1, n_rows)) < 0.7
    shown[..., 0] = True
    numbers = rng.standard_normal((2, 4, 1, n_rows)).astype(np.float32)
    mask = {"none": None, "causal": "causal", "bool": mx.array(shown), "numbers": mx.array(numbers)}[masked]
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    found = np.array(attend(state, queries, view, scale=0.3, mask=mask, sinks=sinks))

    k, v = (np.array(half, dtype=np.float64) for half in dequantised(state, view))
    q = np.array(queries, dtype=np.float64)
    for b in range(2):
        for head in range(4):
            logits = k[b, head // 2] @ q[b, head, 0] * 0.3
            if masked == "bool":
                logits[~shown[b, 0, 0]] = -np.inf
            if masked == "numbers":
                logits += numbers[b, head, 0]
            extra = [float(sinks[head])] if sinks is not None else []
            weights = np.exp(np.append(logits, extra))
            weights = (weights / weights.sum())[:n_rows]
            np.testing.assert_allclose(found[b, head, 0], weights @ v[b, head // 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key_bits": 7}, "key_bits must be one of None, 2, 3"),
        ({"value_bits": True}, "value_bits must be one of"),
        ({"key_bits": 4, "group_size": 48}, "group_size must be one of 32, 64, 128"),
    ],
)
def test_widths_that_mlx_does_not_have_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BUILT_IN["l2norm"].make(budget=16, **arguments)


def test_a_group_that_does_not_divide_the_row_is_refused() -> None:
    method = BUILT_IN["l2norm"].make(budget=16, key_bits=8, group_size=64)
    with pytest.raises(ValueError, match="keys of dimension 32 cannot be quantised in groups of 64"):
        method.init(1, 2, 32)


def test_methods_that_read_stored_keys_again_are_refused() -> None:
    with pytest.raises(ValueError, match="renumber=True turns the stored keys"):
        BUILT_IN["streaming_llm"].make(budget=16, renumber=True, rope={"dims": 32, "base": 50.0}, key_bits=8)
    with pytest.raises(ValueError, match="without filters"):
        BUILT_IN["qfilters"].make(budget=16, value_bits=8).init(1, 2, 64)

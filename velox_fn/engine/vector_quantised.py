"""Rows kept as entries of codebooks: VecInfer.

Source: arXiv:2510.06175, section 3 and algorithm 1, by a summary of them with their formulas; the paper's own text and
code were not to be had, so how wide its codebooks are shared is not verified. A key is divided, channel by channel, by
smoothing factors, the roots of the largest sizes that calibration has seen, and rotated by the orthonormal
Walsh-Hadamard matrix. Queries are multiplied and rotated, so that products stay. Then keys, and values as they are, are
cut into parts of d numbers, and of each part the 8 bits of the nearest of 256 entries are kept: 8/d bits a number.
Logits are looked up in tables of a query's parts by all entries; values are read back for the sum.

Ours, beside the paper:

- A row is stored at unit size (root mean square) with its size beside it, a number in its own dtype: values differ in
  size by orders, and a row that is not finite still shows.
- Every KV head has one codebook for its keys and one for its values, which all parts share.
- Every row is quantised, where the paper keeps the latest 128 as they came.
"""

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.codebooks import ARRAYS, BITS, N_ENTRIES, Codebooks
from velox_fn.engine.constants import Constants
from velox_fn.engine.eviction import Eviction, StateT
from velox_fn.engine.quantised import stored_as


def vector_quantised(
    method: Eviction[StateT],
    *,
    codebooks: int,
    key_smoothing: mx.array | None = None,
    key_codebook: mx.array | None = None,
    value_codebook: mx.array | None = None,
) -> Eviction[StateT]:
    """`method`, with its rows stored as entries of codebooks that calibration made.

    As with `quantised`, a static method keeps the very rows that it keeps without, and views hold rows as they are
    stored or read back.

    Args:
        method: what evicts.
        codebooks: bits of each number: 1, 2 or 4, in parts of d = 8, 4 or 2 numbers. They must divide the widths of
            keys and values; that of keys must be a power of two.
        key_smoothing: [H,D], above 0.
        key_codebook: [H,256,d], of keys smoothed, rotated and at unit size.
        value_codebook: [H,256,d], of values at unit size.

    Raises:
        ValueError: there are no such bits, arrays are lacking or do not fit, or the method cannot work on such rows.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import l2norm, made_codebooks, vector_quantised
        >>> keys, values = mx.random.normal((2, 1, 2, 300, 16))
        >>> books = made_codebooks(keys[0], values[0], 2)
        >>> vector_quantised(l2norm(budget=64), codebooks=2, **books).settings["codebooks"]
        2
    """
    checks.one_of("codebooks", checks.plain(codebooks), BITS)
    given = dict(zip(ARRAYS, (key_smoothing, key_codebook, value_codebook), strict=True))
    arrays = {name: array for name, array in given.items() if array is not None}
    if len(arrays) < len(ARRAYS):
        raise ValueError(
            f"codebooks={codebooks} needs {', '.join(ARRAYS)} of this model's rows; make them once with "
            f"`velox calibrate MODEL --codebooks {codebooks}`, or velox_fn.made_codebooks"
        )
    smoothing, *entries = (arrays[name] for name in ARRAYS)
    shape = (smoothing.shape[0], N_ENTRIES, 8 // codebooks)
    if any(array.shape != shape for array in entries):
        raise ValueError(
            f"codebooks of {codebooks} bits have entries {list(shape)}, got "
            f"{[list(array.shape) for array in entries]}; calibrate with --codebooks {codebooks}, or ask for the bits "
            "that these have"
        )
    check_widths(smoothing.shape[1], shape[2], codebooks)
    books = Constants(smoothing.astype(mx.float32), *(array.astype(mx.float16) for array in entries))
    return stored_as(method, Codebooks(codebooks, books), {"codebooks": codebooks}, arrays)


def check_widths(head_dim: int, value_dim: int, bits: int) -> None:
    """ValueError unless keys of this width can be rotated, and rows cut into parts."""
    d = 8 // bits
    if head_dim & (head_dim - 1) or head_dim % d or value_dim % d:
        raise ValueError(
            f"keys of width {head_dim} and values of width {value_dim} cannot be coded in {bits} bits a number: keys "
            f"are rotated by a Walsh-Hadamard matrix, whose width is a power of two, and rows are cut into parts of "
            f"{d} numbers; store them with key_bits and value_bits"
        )

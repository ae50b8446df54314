"""Codebooks of a layer's rows, by k-means: what `vector_quantised` stores rows by."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from velox_fn.engine.codebooks import N_ENTRIES
from velox_fn.engine.vector_quantised import check_widths

ITERATIONS = 30  # as in arXiv:2510.06175
MOST_PARTS = 2**14  # of a head, that take part: more change little
_SEED = 0


def made_codebooks(
    keys: mx.array,
    values: mx.array,
    bits: int,
    advance: Callable[[int], object] = lambda n_heads: None,
) -> dict[str, mx.array]:
    """The arrays of `vector_quantised` from rows of one layer. The same rows give the same arrays, on every machine.

    Args:
        keys: [H,n,D] after RoPE, of at least 256 parts.
        values: [H,n,D_v].
        bits: of a number: 1, 2 or 4.
        advance: called with 1 after each head.

    Returns:
        key_smoothing float32 [H,D], key_codebook and value_codebook float32 [H,256,d].

    Raises:
        ValueError: rows are too few, not finite, or of widths that cannot be coded.

    Example:
        >>> import mlx.core as mx
        >>> made_codebooks(mx.random.normal((2, 100, 16)), mx.random.normal((2, 100, 16)), 4)["key_codebook"].shape
        (2, 256, 2)
    """
    check_widths(keys.shape[2], values.shape[2], bits)
    d = 8 // bits
    wide = [np.array(rows.astype(mx.float32)) for rows in (keys, values)]
    if min(rows.shape[1] * rows.shape[2] // d for rows in wide) < N_ENTRIES or not all(
        np.isfinite(rows).all() for rows in wide
    ):
        raise ValueError(
            f"codebooks of {N_ENTRIES} entries need as many parts of {d} numbers, all finite, and got keys "
            f"{tuple(keys.shape)} with values {tuple(values.shape)}; give more rows, of a text like the model's own"
        )
    largest = np.abs(wide[0]).max(axis=1)
    smoothing = np.sqrt(np.where(largest > 0, largest, 1)).astype(np.float32)
    turned = np.array(mx.hadamard_transform(mx.array(wide[0] / smoothing[:, None])))
    books: list[list[NDArray[np.float32]]] = [[], []]
    for head in range(len(smoothing)):
        for book, rows in zip(books, (turned[head], wide[1][head]), strict=True):
            book.append(_entries(_parts(rows, d)))
        advance(1)
    key_codebook, value_codebook = (mx.array(np.stack(book)) for book in books)
    return {"key_smoothing": mx.array(smoothing), "key_codebook": key_codebook, "value_codebook": value_codebook}


def _parts(rows: NDArray[np.float32], d: int) -> NDArray[np.float32]:
    """Parts [p,d] of rows [n,W] at unit size, of rows that are spread evenly where there are too many."""
    n_rows = min(len(rows), max(1, MOST_PARTS * d // rows.shape[1]))
    spread = rows[np.linspace(0, len(rows) - 1, n_rows).astype(int)]
    sizes = np.sqrt(np.mean(spread * spread, axis=1, keepdims=True))
    parts: NDArray[np.float32] = (spread / np.maximum(sizes, 1e-30)).reshape(-1, d)
    return parts


def _entries(parts: NDArray[np.float32]) -> NDArray[np.float32]:
    """256 means [256,d] of parts [p,d], by Lloyd's rule. One that is nobody's nearest stays where it is."""
    drawn = np.random.default_rng(_SEED).choice(len(parts), N_ENTRIES, replace=False)
    entries = parts[drawn].astype(np.float64)
    for _ in range(ITERATIONS):
        nearest = np.argmax(parts @ entries.T.astype(np.float32) - (entries**2).sum(1) / 2, axis=1)
        counts = np.bincount(nearest, minlength=N_ENTRIES)
        sums = np.stack([np.bincount(nearest, parts[:, i], N_ENTRIES) for i in range(parts.shape[1])], axis=1)
        entries = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], entries)
    return entries.astype(np.float32)

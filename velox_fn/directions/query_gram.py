"""Filter directions from query activations.

The filter of a head is the sign-fixed top right singular vector of its queries Q [N,D],

    v = sgn(1^T u_1) v_1,        Q = U S V^T.

Queries are not centred: their drift away from the origin is the signal (observation 3.1). v_1 is also the leading
eigenvector of Q^T Q, and 1^T u_1 = <sum of queries, v_1> / s_1. So three sums that do not grow with the number of
tokens (Gram, sum, count) say as much as the queries do. Records of different texts, or of different machines, merge by
addition. The paper samples 3,000 queries per head; the sums take every query.

Queries are those that attention compares with cached keys: after RoPE, and after q_norm where a model has one.

Source: "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression" (arXiv:2503.02812), section 3.2,
equation 1.
"""

import mlx.core as mx
import numpy as np

from velox_fn.engine.checks import whole_number
from velox_fn.engine.records import arrays, record, with_arrays


@record
class QueryGram:
    """Sums over query vectors, float64 (so they live on the CPU stream: GPUs have no float64)."""

    gram: mx.array  # [H_q, D, D] float64: sum of q q^T
    total: mx.array  # [H_q, D] float64: sum of q
    count: mx.array  # [] float64: queries per head


def query_gram_init(n_heads: int, head_dim: int) -> QueryGram:
    """The sums over no query.

    Args:
        n_heads: H_q, query heads of the layer.
        head_dim: D, their width.

    Raises:
        ValueError: either is not a positive whole number.
    """
    n_heads = whole_number("n_heads", n_heads, 1)
    head_dim = whole_number("head_dim", head_dim, 1)
    with mx.stream(mx.cpu):
        return QueryGram(
            gram=mx.zeros((n_heads, head_dim, head_dim), mx.float64),
            total=mx.zeros((n_heads, head_dim), mx.float64),
            count=mx.zeros((), mx.float64),
        )


def query_gram_update(state: QueryGram, queries: mx.array, valid: mx.array | None = None) -> QueryGram:
    """Add queries to the sums.

    A query that is not finite makes the sums so, and `query_gram_filters` then refuses.

    Args:
        state: the sums so far.
        queries: [H_q,N,D] or [B,H_q,N,D], any float dtype.
        valid: int32 [B], the real tokens of each sequence. What follows them is padding and is left out. None: all are
            real.

    Raises:
        ValueError: the shape does not fit the state's heads and width.
    """
    blocks = queries[None] if queries.ndim == 3 else queries
    n_heads, head_dim = state.total.shape
    if blocks.ndim != 4 or blocks.shape[1] != n_heads or blocks.shape[3] != head_dim:
        raise ValueError(
            f"queries must be [{n_heads},N,{head_dim}] or [B,{n_heads},N,{head_dim}], got {tuple(queries.shape)}; "
            "one record belongs to one attention layer"
        )
    batch, _, n_tokens, _ = blocks.shape
    if valid is not None and valid.shape != (batch,):
        raise ValueError(f"valid must be int32 [{batch}], one count per row of queries, got shape {tuple(valid.shape)}")
    if batch * n_tokens == 0:
        return state  # nothing to sum, and MLX's sum over an axis of no elements may never end
    with mx.stream(mx.cpu):
        rows = blocks.astype(mx.float64)
        if valid is None:
            count = mx.array(float(batch * n_tokens), mx.float64)
        else:
            real = mx.arange(n_tokens)[None] < valid[:, None]
            rows = mx.where(real[:, None, :, None], rows, mx.zeros((), mx.float64))
            count = real.sum().astype(mx.float64)
        return QueryGram(
            gram=state.gram + (rows.swapaxes(-1, -2) @ rows).sum(0),
            total=state.total + rows.sum((0, 2)),
            count=state.count + count,
        )


def query_gram_merge(first: QueryGram, second: QueryGram) -> QueryGram:
    """The sums over both sets of queries.

    Raises:
        ValueError: heads or widths differ.
    """
    if first.total.shape != second.total.shape:
        raise ValueError(
            f"records of {tuple(first.total.shape)} and {tuple(second.total.shape)} (heads, width) cannot be merged; "
            "merge records of the same layer of the same model"
        )
    with mx.stream(mx.cpu):
        return with_arrays(first, [a + b for a, b in zip(arrays(first), arrays(second), strict=True)])


def query_gram_filters(state: QueryGram) -> mx.array:
    """Filters from the sums. The mean query of each head projects on its filter positively. Evaluates its input.

    Returns:
        float32 [H_q,D] of unit norm. A head whose queries are all zero gets an arbitrary unit vector.

    Raises:
        ValueError: no query was added, or one was not finite.
    """
    _check_not_empty(state)
    if not mx.isfinite(state.gram).all(stream=mx.cpu).item():
        raise ValueError(
            "queries must be finite, but some were NaN or infinite; check the model's weights and dtype "
            "(float16 overflows above 65504)"
        )
    with mx.stream(mx.cpu):
        _, directions = mx.linalg.eigh(state.gram)
        leading = directions[..., -1]  # eigh sorts ascending
        drift = (state.total * leading).sum(-1, keepdims=True)
        return mx.where(drift < 0, -leading, leading).astype(mx.float32)


def query_gram_moments(state: QueryGram, n_kv_heads: int) -> tuple[mx.array, mx.array]:
    """Mean and covariance of the queries of each KV head.

    The H_q / n_kv_heads consecutive query heads of a group count together, as one set of queries.

    Returns:
        Mean float32 [n_kv_heads,D] and covariance float32 [n_kv_heads,D,D].

    Raises:
        ValueError: no query was added, or H_q is not a multiple of `n_kv_heads`.
    """
    n_kv_heads = whole_number("n_kv_heads", n_kv_heads, 1)
    n_heads, head_dim = state.total.shape
    if n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads cannot be split evenly over n_kv_heads={n_kv_heads}")
    _check_not_empty(state)
    with mx.stream(mx.cpu):
        queries = state.count * (n_heads // n_kv_heads)
        mean = state.total.reshape(n_kv_heads, -1, head_dim).sum(1) / queries
        second = state.gram.reshape(n_kv_heads, -1, head_dim, head_dim).sum(1) / queries
        covariance = second - mean[..., None] * mean[..., None, :]
        return mean.astype(mx.float32), covariance.astype(mx.float32)


def compute_qfilters(queries: mx.array, max_samples_per_head: int | None = None, seed: int = 0) -> mx.array:
    """Filters of one layer from its queries: the one-shot form of the sums.

    Args:
        queries: [H_q,N,D] after RoPE, any float dtype.
        max_samples_per_head: draw so many of the N tokens without replacement, the same for every head. None takes all.
            The paper drew 3,000.
        seed: of the draw.

    Returns:
        float32 [H_q,D] of unit norm.

    Raises:
        ValueError: queries are not 3-D, hold no token or are not finite, or `max_samples_per_head` is below 1.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import average_gqa_filters, compute_qfilters
        >>> per_query_head = compute_qfilters(mx.random.normal((4, 100, 8)) + 1)
        >>> average_gqa_filters(per_query_head, n_kv_heads=2).shape
        (2, 8)
    """
    if queries.ndim != 3:
        raise ValueError(
            f"queries must be [H_q,N,D], got {tuple(queries.shape)}; for a batch [B,H_q,N,D] use query_gram_update"
        )
    n_heads, n_tokens, head_dim = queries.shape
    if n_tokens == 0:
        raise ValueError("queries hold no token (N = 0); a filter needs at least one query")
    if max_samples_per_head is not None:
        n_samples = whole_number("max_samples_per_head", max_samples_per_head, 1)
        if n_samples < n_tokens:
            drawn = np.random.default_rng(seed).choice(n_tokens, size=n_samples, replace=False)
            queries = queries[:, mx.array(np.sort(drawn))]
    return query_gram_filters(query_gram_update(query_gram_init(n_heads, head_dim), queries))


def average_gqa_filters(filters: mx.array, n_kv_heads: int) -> mx.array:
    """Filters of KV heads from those of query heads.

    Grouped-query attention gives each KV head H_q / n_kv_heads consecutive query heads. Their filters are averaged
    (paper, section 3.2) and normalised again.

    Args:
        filters: [H_q,D].
        n_kv_heads: KV heads of the layer.

    Returns:
        float32 [n_kv_heads,D] of unit norm.

    Raises:
        ValueError: filters are not 2-D or not finite; H_q is not a multiple of `n_kv_heads`; or the filters of a group
            cancel and leave no direction.
    """
    if filters.ndim != 2:
        raise ValueError(f"filters must be [H_q,D], got {tuple(filters.shape)}")
    n_kv_heads = whole_number("n_kv_heads", n_kv_heads, 1)
    n_heads, head_dim = filters.shape
    if n_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} query heads cannot be split evenly over n_kv_heads={n_kv_heads}; "
            "give the model's own number of KV heads"
        )
    with mx.stream(mx.cpu):
        mean = filters.astype(mx.float64).reshape(n_kv_heads, -1, head_dim).mean(1)
        norm = mx.linalg.norm(mean, axis=-1, keepdims=True)
        averaged = (mean / norm).astype(mx.float32)
    if not mx.isfinite(averaged).all().item():
        raise ValueError(
            "filters must be finite and must not cancel within a group of query heads: at least one KV head is left "
            "without a direction"
        )
    return averaged


def _check_not_empty(state: QueryGram) -> None:
    if bool((state.count < 1).item()):
        raise ValueError("no query was added to this record; call query_gram_update with at least one token first")

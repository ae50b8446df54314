"""The one selection rule.

Each row has a *rank*, an int64 that packs its score and its position, so that the whole order of the rule is the order
of integers: a higher score is better; among equal scores the lower position is better; a padding row (position -1) is
worse than every token. Scores frozen in a rank hold +inf for sinks and pinned positions. Rows of the recent window are
lifted above everything only at the moment of choosing, since the window moves. So is the score of a chunk put on its
rows, where rows leave in chunks (`chunks`): all of a chunk then stand next to each other in the order, lower positions
first.

Scores that grow with the position turn the tie around: among equals the higher position is better. Float32 has no room
for every position, so rows that differ in age alone may round to equal scores, and then their order is still exact.

The low 32 bits of a rank hold the position: 2^31 - 1 - position, or 2^31 + 1 + position where the tie is turned around,
so that both give 2^31 for padding. Positions end at 2^31 - 2 (`checks.countable`).
"""

import functools
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx

_LOW_BITS = 0xFFFFFFFF
_MAX_POSITION = 0x7FFFFFFF
_NEWEST_FIRST = 0x80000001  # low bits from here on hold positions of which the higher is better
_PADDING_SCORE = -0x80000000
_INFINITY = 0x7F800000  # the bits of +inf; those that every number that is not finite has
_MINUS_INFINITY = -0x7F800001  # -inf as _ordered has it
_MINUS_ZERO = -1  # -0.0 likewise
_BITS = MappingProxyType(
    {  # an integer type as wide, the bits without the sign, those of +inf
        mx.float32: (mx.int32, 0x7FFFFFFF, 0x7F800000),
        mx.float16: (mx.int16, 0x7FFF, 0x7C00),
        mx.bfloat16: (mx.int16, 0x7FFF, 0x7F80),
    }
)
_PROTECTED = 0x7FFFFFFFFFFFFFFF
PADDING = (_PADDING_SCORE << 32) | (_MAX_POSITION + 1)  # the rank of every padding row


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of rows as they arrive, and what they do not see."""

    terms: mx.array  # float32 [B,H,S], or [B,H,S,n], still to be summed: one sum then scores and checks a row
    unseen: tuple[mx.array, ...]
    """Those of keys [B,H,S,D] and values [B,H,S,D_v] that may hold NaN or infinity while the score is finite."""
    newest_first: bool = False  # whether the higher position is better among equal scores


def pack_ranks(scores: mx.array, positions: mx.array) -> mx.array:
    """Ranks int64 of scores float32 (no NaN) and positions int32 of the same shape; -0.0 equals +0.0."""
    return _packed(_ordered(scores.view(mx.int32)), positions, newest_first=False)


def _ordered(bits: mx.array) -> mx.array:
    """int32 in the order of the float32 numbers that have these bits; both zeros are 0."""
    ordered = mx.where(bits >= 0, bits, bits ^ _MAX_POSITION)
    return mx.where(ordered == _MINUS_ZERO, 0, ordered)


def _packed(ordered: mx.array, positions: mx.array, *, newest_first: bool) -> mx.array:
    ordered = mx.where(positions < 0, _PADDING_SCORE, ordered)
    wide = positions.astype(mx.int64)
    return (ordered.astype(mx.int64) << 32) | (wide + _NEWEST_FIRST if newest_first else _MAX_POSITION - wide)


def rank_positions(ranks: mx.array) -> mx.array:
    """The positions int32 packed in ranks; -1 for padding."""
    return _wide_positions(ranks).astype(mx.int32)


def _wide_positions(ranks: mx.array) -> mx.array:
    low = ranks & _LOW_BITS
    return mx.where(low < _NEWEST_FIRST, _MAX_POSITION - low, low - _NEWEST_FIRST)


def rank_scores(ranks: mx.array) -> mx.array:
    """The scores float32 packed in ranks: +inf for protected rows, -inf for padding and rows with a non-finite part."""
    ordered = mx.minimum(ranks >> 32, _INFINITY).astype(mx.int32)
    scores = mx.where(ordered >= 0, ordered, ordered ^ _MAX_POSITION).view(mx.float32)
    return mx.where(ordered == _PADDING_SCORE, -mx.inf, scores)


def arrival_ranks(scores: Scores, positions: mx.array, staying: int | mx.array) -> mx.array:
    """Ranks [B,H,S] of rows as they arrive, at positions int32, broadcastable to [B,H,S].

    A row with a non-finite key, value or score competes as -inf; rows that never leave hold +inf. staying: their
    positions as `Store.staying` has them, the sinks alone as an array int32 [] inside a compiled step, so that one step
    serves every number.
    """
    if scores.terms.shape[2] == 1:
        step = _compiled_arrival[scores.newest_first]
        return step(scores.terms, positions, mx.array(staying, mx.int32), *scores.unseen)
    return _arrival_ranks(scores.terms, positions, staying, *scores.unseen, newest_first=scores.newest_first)


def _arrival_ranks(
    terms: mx.array, positions: mx.array, staying: int | mx.array, *unseen: mx.array, newest_first: bool
) -> mx.array:
    if terms.shape[2] == 1 and len({rows.shape for rows in unseen}) == 1:
        # The fewest kernels for one token: zeros added to a sum do not change it, and NaN comes through.
        zeros = functools.reduce(mx.add, [rows.astype(mx.float32) * 0 for rows in unseen])
        terms, unseen = terms + (zeros if zeros.shape == terms.shape else zeros.sum(-1, keepdims=terms.ndim == 4)), ()
    bits = (terms.sum(-1) if terms.ndim == 4 else terms).view(mx.int32)
    unsound = (bits & _INFINITY) == _INFINITY
    for rows in unseen:
        unsound = unsound | _any_not_finite(rows)
    ordered = mx.where(unsound, _MINUS_INFINITY, _ordered(bits))
    if isinstance(staying, mx.array) or staying > 0:
        ordered = mx.where(never_leave(positions, staying), _INFINITY, ordered)
    return _packed(ordered, mx.broadcast_to(positions, ordered.shape), newest_first=newest_first)


def never_leave(positions: mx.array, staying: int | mx.array) -> mx.array:
    """Whether positions int32 [B,H,S] are among the first `staying` ones, or in one of its ranges int32 [B,P,2]."""
    if not isinstance(staying, mx.array) or staying.ndim == 0:
        return positions < staying
    inside = [
        (positions >= staying[:, i, 0, None, None]) & (positions < staying[:, i, 1, None, None])
        for i in range(staying.shape[1])
    ]  # one by one, since single tokens cost by the number of kernels and these are fused
    return functools.reduce(mx.logical_or, inside)


_compiled_arrival = MappingProxyType(  # of one token: small work, whose cost is the number of kernels
    {newest: mx.compile(functools.partial(_arrival_ranks, newest_first=newest)) for newest in (False, True)}
)


def largest_magnitude(rows: mx.array) -> mx.array:
    """The largest magnitude [...] in each row of rows [...,D], of their dtype; not finite where a number is not.

    By its bits, since an integer maximum costs a small part of floating-point work in half precision on a CPU.
    """
    return _largest_bits(rows).view(rows.dtype)


def _any_not_finite(rows: mx.array) -> mx.array:
    """Whether a row of rows [...,D] holds a number that is not finite. bool [...]"""
    return _largest_bits(rows) >= _BITS[rows.dtype][2]


def _largest_bits(rows: mx.array) -> mx.array:
    integers, all_but_sign, _ = _BITS[rows.dtype]
    return (rows.view(integers) & all_but_sign).max(-1)


def reranked(ranks: mx.array, scores: mx.array) -> mx.array:
    """`ranks` [B,H,n] with new scores float32 [B,H,n]; what is not finite in the old ones stays.

    That is +inf of sinks, -inf of padding and of rows with a non-finite part. A new score that is not finite is -inf.
    """
    held = rank_scores(ranks)
    scores = mx.where(mx.isfinite(scores), scores, -mx.inf)
    return pack_ranks(mx.where(mx.isfinite(held), scores, held), rank_positions(ranks))


def competing_ranks(ranks: mx.array, offset: mx.array, recent: int | mx.array) -> mx.array:
    """`ranks` [B,H,n] with the rows of the recent window, position >= offset - recent, lifted above every other.

    offset int32 [B]: tokens seen. recent: an array int32 [] inside a compiled step that has a window. Lifted ranks
    compare equal among themselves, which cannot matter: protected rows are fewer than any budget.
    """
    if not isinstance(recent, mx.array) and recent == 0:
        return ranks
    first_recent = mx.maximum(offset - recent, 0).astype(mx.int64)[:, None, None]  # below 0 stands padding
    return mx.where(_wide_positions(ranks) >= first_recent, _PROTECTED, ranks)


def chunk_ranks(ranks: mx.array, offset: mx.array, recent: int, chunk: int) -> mx.array:
    """`ranks` [B,H,n] where each row that competes has the mean score of those in its chunk (`chunks`)."""
    positions, scores = rank_positions(ranks), rank_scores(ranks)
    competes = mx.isfinite(scores) & (positions < mx.maximum(offset - recent, 0)[:, None, None])
    order = mx.argsort(mx.where(competes, positions, _MAX_POSITION), axis=-1)  # so that a sum has one order
    chunks = mx.where(competes, positions // chunk, -1)
    chunks, scores = (mx.take_along_axis(part, order, axis=-1) for part in (chunks, scores))
    place = mx.arange(ranks.shape[-1])
    begins = chunks != mx.concatenate([chunks[..., :1] - 1, chunks[..., :-1]], axis=-1)
    members = mx.cummax(mx.where(begins, place, 0), axis=-1)[..., None] + mx.arange(chunk)  # [B,H,n,chunk]
    index = mx.minimum(members, ranks.shape[-1] - 1).flatten(-2)
    theirs, held = (mx.take_along_axis(part, index, axis=-1).reshape(members.shape) for part in (chunks, scores))
    same = (theirs == chunks[..., None]) & (members < ranks.shape[-1])
    # By a power of two first, so that no sum overflows and nothing is rounded twice: equal means are ties.
    whole = float(1 << (chunk - 1).bit_length())
    means = (mx.where(same, held, 0.0) / whole).sum(-1) / same.sum(-1) * whole
    means = mx.take_along_axis(means, mx.argsort(order, axis=-1), axis=-1)
    by_chunk = (_ordered(means.view(mx.int32)).astype(mx.int64) << 32) | (ranks & _LOW_BITS)
    return mx.where(competes, by_chunk, ranks)


def victim(ranks: mx.array) -> mx.array:
    """Index [B,H,1] of the row that leaves first, for competing ranks [B,H,n]."""
    return mx.argmin(ranks, axis=-1, keepdims=True)


def survivors(ranks: mx.array, keep: int) -> mx.array:
    """Indices uint32 [B,H,keep] of the best `keep` rows for competing ranks [B,H,n]: in row order, padding last."""
    n = ranks.shape[-1]
    if keep >= n:
        return mx.broadcast_to(mx.arange(n, dtype=mx.uint32), ranks.shape)
    index = mx.argpartition(ranks, n - keep, axis=-1)[..., n - keep :]
    padding = mx.take_along_axis(ranks, index, axis=-1) == PADDING
    return mx.sort(mx.where(padding, index + n, index), axis=-1) % n

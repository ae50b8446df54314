"""Slow numpy models of what the caches must do, written from the design page and not from the code."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


def best_positions(
    scores: Floats, positions: list[int], offset: int, *, budget: int, n_sink: int = 0, recent: int = 0
) -> list[int]:
    """Positions that one head keeps: protected ones, then higher scores, then lower positions; in temporal order.

    scores[i] belongs to positions[i]; NaN, or an infinity of either sign, loses to every finite score.
    """

    def merit(row: int) -> tuple[int, float, int]:
        score = float(scores[row])
        protected = positions[row] < n_sink or positions[row] >= offset - recent
        return (1 if protected else 0, score if np.isfinite(score) else -np.inf, -positions[row])

    order = sorted(range(len(positions)), key=merit, reverse=True)
    return sorted(positions[row] for row in order[:budget])


@dataclass
class StaticOracle:
    """One sequence under a static method: every token it ever saw, and which of them it keeps."""

    budget: int
    n_sink: int = 0
    recent: int = 0
    keep_all_until: int = 0  # the fallback keeps everything until it has seen so many tokens
    keys: list[Floats] = field(default_factory=list)  # each [H, D]
    values: list[Floats] = field(default_factory=list)  # each [H, D_v]

    @property
    def offset(self) -> int:
        return len(self.keys)

    def see(self, keys: Floats, values: Floats) -> None:
        """Tokens keys [H,S,D], values [H,S,D_v]."""
        for t in range(keys.shape[1]):
            self.keys.append(keys[:, t])
            self.values.append(values[:, t])

    def forget(self, n_tokens: int) -> None:
        """The last tokens were never seen."""
        for column in (self.keys, self.values):
            del column[len(column) - n_tokens :]

    def kept(self, scores: Floats) -> list[int]:
        """Positions that a head keeps, by its scores [offset].

        Scores are frozen and the order is total, so the best of all tokens ever seen are those that stayed.
        """
        if self.offset < self.keep_all_until:
            return list(range(self.offset))
        positions = list(range(self.offset))
        return best_positions(
            scores, positions, self.offset, budget=self.budget, n_sink=self.n_sink, recent=self.recent
        )


def attention(queries: Floats, keys: Floats, values: Floats, scale: float, visible: npt.NDArray[np.bool_]) -> Floats:
    """Softmax attention in float64: queries [H,S,D] over keys [H,n,D], values [H,n,D_v]; visible [S,n]."""
    logits = np.where(visible, scale * queries.astype(np.float64) @ keys.astype(np.float64).swapaxes(-1, -2), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended: Floats = weights @ np.where(np.isfinite(values), values, 0).astype(np.float64)
    return attended

"""CurDKV token by token in float64 numpy, by a singular value decomposition of every weighted block."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


class CurDKVOracle:
    """One KV head. Rows are kept in temporal order; `scores` are cumulative."""

    def __init__(self, budget: int, n_sink: int = 4, recent: int = 0, rank_cap: int = 16) -> None:
        self.budget, self.n_sink, self.recent, self.rank_cap = budget, n_sink, recent, rank_cap
        self.keys: list[Floats] = []
        self.values: list[Floats] = []
        self.positions: list[int] = []
        self.scores: list[float] = []
        self.offset = 0

    def block(self, keys: Floats, values: Floats, queries: Floats) -> None:
        """S tokens, keys [S,D], values [S,D_v], queries [G,S,D]: scored by all their queries, evicted once."""
        first = self.offset
        for t in range(len(keys)):
            self.keys.append(keys[t].astype(np.float64))
            self.values.append(values[t].astype(np.float64))
            self.positions.append(self.offset)
            self.scores.append(0.0)
            self.offset += 1
        stacked = [
            self._weights(query[t].astype(np.float64), first + t)[:, None] * np.array(self.values)
            for query in queries
            for t in range(len(keys))
        ]
        for row, gain in enumerate(self._leverage(stacked)):
            self.scores[row] += gain
        while len(self.positions) > self.budget:
            self._evict()

    def tokens(self, keys: Floats, values: Floats, queries: Floats) -> None:
        """The same, one after the other."""
        for t in range(len(keys)):
            self.block(keys[t : t + 1], values[t : t + 1], queries[:, t : t + 1])

    def _weights(self, query: Floats, position: int) -> Floats:
        logits = np.array(self.keys) @ query / np.sqrt(len(query))
        logits[np.array(self.positions) > position] = -np.inf
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def _leverage(self, weighted: list[Floats]) -> Floats:
        """Energy-weighted leverage of each stored row in the stack of the blocks, summed over its copies there."""
        right = np.linalg.svd(np.concatenate(weighted), full_matrices=False)[2]
        rank = min(self.rank_cap, *weighted[0].shape)
        along = sum(((block @ right[:rank].T) ** 2).sum(-1) for block in weighted)
        return along / along.sum() if along.sum() > 0 else np.zeros(len(self.values))

    def _evict(self) -> None:
        candidates = [
            row for row, position in enumerate(self.positions) if self.n_sink <= position < self.offset - self.recent
        ]
        victim = min(candidates, key=lambda row: (self.scores[row], -self.positions[row]))
        for column in (self.keys, self.values, self.positions, self.scores):
            del column[victim]

"""A candidate of the search over the weights of a fusion, and how it changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.default_recent import RECENT_SHARE
from velox_cache.calibration.fusion_choice import FusionChoice
from velox_cache.calibration.fusion_weights import with_weights

LEVELS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""The weights that a term may have."""
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""The shares of the budget that recent rows may have."""


@dataclass(frozen=True)
class Candidate:
    """Weights as indices of LEVELS, by layer, head and term, and the recent share as an index of SHARES."""

    levels: Mapping[int, tuple[tuple[int, ...], ...]]
    share: int = SHARES.index(RECENT_SHARE)

    def in_calibration(self, calibration: Calibration, choice: FusionChoice) -> Calibration:
        """The calibration with this candidate's weights."""
        weights = {layer: mx.array([[LEVELS[i] for i in head] for head in own]) for layer, own in self.levels.items()}
        return with_weights(calibration, replace(choice, recent_share=SHARES[self.share]), weights)

    def is_like(self, other: "Candidate") -> bool:
        """Whether both have weights for the same layers, heads and terms, of levels and shares that there are."""
        if not 0 <= self.share < len(SHARES) or self.levels.keys() != other.levels.keys():
            return False
        heads = [head for own in self.levels.values() for head in own]
        alike = all([*map(len, own)] == [*map(len, other.levels[layer])] for layer, own in self.levels.items())
        return alike and all(0 <= level < len(LEVELS) and any(head) for head in heads for level in head)

    def plain(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"levels": {str(layer): own for layer, own in self.levels.items()}, "share": self.share}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Candidate":
        levels = {int(layer): tuple(tuple(head) for head in own) for layer, own in plain["levels"].items()}
        return cls(levels, plain["share"])


def equal_weights(calibration: Calibration, n_terms: int) -> Candidate:
    """The candidate that the search begins with, which is also what holds without one."""
    one_head = (LEVELS.index(1.0),) * n_terms
    return Candidate({i: (one_head,) * f.shape[0] for i, f in enumerate(calibration.filters) if f is not None})


def moved(candidate: Candidate, step: int) -> Candidate | None:
    """The candidate changed as a whole: one term's weight in every layer, or the recent share, one level down or up.

    `step` counts through all such moves, twice, since moves that fail at first may help after others; then None.
    """
    n_terms = len(next(iter(candidate.levels.values()))[0])
    if step >= 2 * (round_of_moves := 2 * (n_terms + 1)):
        return None
    what, up = divmod(step % round_of_moves, 2)
    by = 1 if up else -1
    return _with_share(candidate, by) if what == n_terms else _with_level(candidate, list(candidate.levels), what, by)


def changed(candidate: Candidate, rng: np.random.Generator) -> Candidate:
    """The candidate with the recent share moved to a neighbour, or one term's weight in some consecutive layers."""
    if rng.random() < 0.15:
        return _with_share(candidate, int(rng.choice((-1, 1))))
    layers = list(candidate.levels)
    length = min(len(layers), 2 ** int(rng.integers(0, len(layers).bit_length() + 1)))
    first = int(rng.integers(0, len(layers) - length + 1))
    term = int(rng.integers(len(next(iter(candidate.levels.values()))[0])))
    by = int(rng.choice((-1, 1)))
    head = int(rng.integers(1 << 16)) if rng.random() < 1 / 3 else None  # one head of each layer, or all
    return _with_level(candidate, layers[first : first + length], term, by, head)


def _with_share(candidate: Candidate, by: int) -> Candidate:
    return replace(candidate, share=_clipped(candidate.share + by, SHARES))


def _with_level(candidate: Candidate, layers: Sequence[int], term: int, by: int, head: int | None = None) -> Candidate:
    levels = dict(candidate.levels)
    for layer in layers:
        own = [list(weights) for weights in levels[layer]]
        for weights in own if head is None else [own[head % len(own)]]:
            level = _clipped(weights[term] + by, LEVELS)
            if level > 0 or sum(weights) > weights[term]:  # at least one term stays
                weights[term] = level
        levels[layer] = tuple(tuple(weights) for weights in own)
    return replace(candidate, levels=levels)


def _clipped(index: int, among: Sequence[float]) -> int:
    return max(0, min(index, len(among) - 1))

"""What a search over the weights of a fusion found, as a calibration carries it."""

from collections.abc import Sequence
from dataclasses import dataclass

from velox_fn.methods.fusion import term_names


@dataclass(frozen=True)
class FusionChoice:
    """The fusion whose weights the layers' statistics hold. It is used where exactly this fusion is asked for."""

    terms: tuple[str, ...]
    combine: str
    recent_share: float  # of the budget

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", term_names(self.terms))
        if not 0 <= self.recent_share < 1:
            raise ValueError(f"recent_share is a share of the budget, from 0 to below 1, got {self.recent_share}")

    def is_of(self, terms: Sequence[str], combine: str) -> bool:
        """Whether a fusion of these terms is the one that was searched."""
        return (self.terms, self.combine) == (tuple(terms), combine)

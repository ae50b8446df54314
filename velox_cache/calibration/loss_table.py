"""What the layers' statistics hold of the losses that budgets bring, as the calibration carries it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossTable:
    """The axes of the losses [H, methods, shares] of each layer."""

    methods: tuple[str, ...]  # by whose scores rows left
    shares: tuple[float, ...]  # of the rows of the context, that stayed; ascending
    n_context: int  # rows of the context

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(self.methods))
        object.__setattr__(self, "shares", tuple(self.shares))
        if not self.methods or list(self.shares) != sorted(set(self.shares)) or not self.shares or self.n_context < 1:
            raise ValueError(f"losses are those of some methods at ascending shares of a context, got {self}")

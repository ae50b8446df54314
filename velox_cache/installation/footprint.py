"""What the rows of one sequence take, with and without bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from velox_cache.installation.tiers import Tier, n_heads


@dataclass(frozen=True)
class Footprint:
    """Bytes of keys and values in the bounded layers of one sequence. Layers that bound themselves are left out."""

    layers: tuple[
        tuple[int, int, int], ...
    ]  # of each tier of a bounded layer: bytes of a token, those of a row, most rows held
    leaves_from: int  # the first token with which rows leave, counted from 1

    @property
    def token_bytes(self) -> int:
        """Of one more token, while all are kept."""
        return sum(size for size, _, _ in self.layers)

    @property
    def most_bytes(self) -> int:
        """However long the sequence grows."""
        return self.bounded_bytes(2**62)

    def full_bytes(self, n_tokens: int) -> int:
        """Of a sequence whose rows all stay."""
        return n_tokens * self.token_bytes

    def bounded_bytes(self, n_tokens: int) -> int:
        """Of a sequence whose rows leave."""
        return sum(stored * min(n_tokens, rows) for _, stored, rows in self.layers)

    def __str__(self) -> str:
        return (
            f"a sequence takes at most {in_units(self.most_bytes)} in these layers, where every token took "
            f"{in_units(self.token_bytes)} ({in_units(self.full_bytes(32768))} at 32,768 tokens); rows leave from "
            f"token {self.leaves_from:,} on"
        )


def footprint(
    token_bytes: Sequence[int | None], stored_bytes: Sequence[int | None], methods: Mapping[int, Sequence[Tier]]
) -> Footprint | None:
    """That of methods by layer; None where something of it is not known.

    token_bytes: of each layer, what a token brings. stored_bytes: what its row takes, less where rows are quantised.
    """
    layers, leaves = [], []
    for layer, tier in ((layer, tier) for layer, tiers in methods.items() for tier in tiers):
        size, stored = token_bytes[layer], stored_bytes[layer]
        budget, interval = tier.method.settings.get("budget"), tier.method.settings.get("interval", 1)
        if size is None or stored is None or not isinstance(budget, int):
            return None
        part, whole = n_heads(tier, methods[layer])
        layers.append((size * part // whole, stored * part // whole, budget + interval - (interval == 1)))
        leaves.append((budget // interval + 1) * interval + (interval > 1))  # what comes at a boundary sees them still
    return Footprint(tuple(layers), min(leaves))


def in_units(n_bytes: float) -> str:
    """Bytes in KiB, MiB or GiB, with three figures or so."""
    for unit in ("bytes", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.3g} {unit}" if unit == "bytes" or n_bytes < 100 else f"{n_bytes:.0f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"

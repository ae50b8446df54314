"""What `install` says of what it did."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from velox_cache.installation.footprint import Footprint
from velox_cache.introspection.plan import LayerPlan


@dataclass(frozen=True)
class InstallReport:
    """What `install` did, layer by layer, and what it means for a sequence. `str` of it says so in words.

    method: the method's name. settings: the arguments that its factory got, by name, such as settings["budget"]; a
    list, one entry per bounded layer, where layers differ. layers: one `LayerPlan` per entry of the prompt cache, with
    whether it is bounded, and why not. footprint: bytes before and now; None where rows do not say how large they are.
    calibration: of what, on what, and how well it predicts; None where none is used. left_out: which terms of a fusion
    that nobody chose are left out on this model, and why; None where none is. shares: the rule by which the layers
    share the budget, and what comes of it; None where none was asked for.
    """

    method: str
    settings: Mapping[str, Any]
    layers: tuple[LayerPlan, ...]
    footprint: Footprint | None = None
    calibration: str | None = None
    left_out: str | None = None
    shares: str | None = None

    def __str__(self) -> str:
        bounded = [entry for entry in self.layers if entry.bounded]
        shown = {name: value if self.shares is None else _in_short(value) for name, value in self.settings.items()}
        settings = ", ".join(f"{name}={value}" for name, value in shown.items())
        lines = [f"{self.method} ({settings}) bounds {len(bounded)} of {len(self.layers)} layers"]
        for reason in dict.fromkeys(entry.reason for entry in self.layers if not entry.bounded):
            skipped = [str(entry.layer) for entry in self.layers if entry.reason == reason]
            lines.append(f"  not bounded, layers {', '.join(skipped)}: {reason}")
        lines += [
            f"  {fact}" for fact in (self.shares, self.left_out, self.footprint, self.calibration) if fact is not None
        ]
        return "\n".join(lines)


def _in_short(value: Any) -> Any:
    """A setting; where layers or heads differ the least and the largest."""
    layers = value if isinstance(value, list) else []
    found = [one for of_layer in layers for one in (of_layer if isinstance(of_layer, list) else [of_layer])]
    return f"{min(found)} to {max(found)}" if found and all(isinstance(one, int) for one in found) else value

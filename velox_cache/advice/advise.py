"""A budget for a model, a memory and a context, and what it costs in bytes. What it costs in quality is measured."""

from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, load_model

from velox_cache.installation.footprint import in_units
from velox_cache.introspection.plan import plan_layers
from velox_cache.introspection.row_bytes import row_bytes
from velox_fn.engine.checks import whole_number

LENGTHS = (4096, 32768, 131072)
FORWARD_SHARE = 0.1
"""Of the memory, left for what a forward pass takes: it is not known beforehand."""
STEP, LEAST = 64, 128  # budgets advised are multiples of the first, and at least the second


@dataclass(frozen=True)
class Advice:
    """What fits. All sizes in bytes, rows of one sequence."""

    n_layers: int
    bounded_layers: int
    weight_bytes: int
    token_bytes: int  # of one token in the layers that can be bounded
    memory: int
    context: int
    budget: int | None  # None: the rows of the whole context fit

    @property
    def room(self) -> int:
        """For rows: what weights and a forward pass leave."""
        return int(self.memory * (1 - FORWARD_SHARE)) - self.weight_bytes

    def bounded_bytes(self, n_tokens: int) -> int:
        """Of the rows kept of so many tokens."""
        return self.token_bytes * (n_tokens if self.budget is None else min(n_tokens, self.budget))

    def lines(self) -> list[str]:
        """In words, with a table."""
        advised = "none is needed, all rows fit" if self.budget is None else f"{self.budget:,} rows"
        heading = "as they are" if self.budget is None else f"budget {self.budget:,}"
        rows = [
            f"  {n:>9,} {in_units(n * self.token_bytes):>14} {in_units(self.bounded_bytes(n)):>14}" for n in LENGTHS
        ]
        return [
            f"weights  {in_units(self.weight_bytes)}",
            f"layers   {self.bounded_layers} of {self.n_layers} can be bounded; a token takes "
            f"{in_units(self.token_bytes)} in them",
            f"memory   {in_units(self.memory)}, which leaves {in_units(self.room)} for rows beside the weights and "
            f"{FORWARD_SHARE:.0%} for the forward pass",
            f"budget   {advised}, for contexts of {self.context:,} tokens",
            f"  {'tokens':>9} {'without bounds':>14} {heading:>14}",
            *rows,
        ]


def advise(model: nn.Module, *, memory: int, context: int) -> Advice:
    """The largest budget, up to the context, whose rows fit beside the model's weights. Computes nothing.

    Raises ValueError when no layer can be bounded, when rows do not say how large they are, and when the weights leave
    no room for a budget of 128 rows.
    """
    context = whole_number("context", context, 1)
    plan = plan_layers(model)
    bounded = [entry for entry in plan if entry.bounded]
    if not bounded:
        raise ValueError(f"no layer of this model can be bounded: {'; '.join({entry.reason for entry in plan})}")
    sizes = row_bytes(model)
    taken = [size for entry in bounded if (size := sizes[entry.layer]) is not None]
    if len(taken) < len(bounded) or not sum(taken):
        raise ValueError("this model cannot be called on this machine, so the size of its rows is not known")
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    found = Advice(
        len(plan), len(bounded), sum(array.nbytes for array in weights.values()), sum(taken), memory, context, None
    )
    fitting = found.room // found.token_bytes
    if fitting >= context:
        return found
    budget = fitting // STEP * STEP
    if budget < LEAST:
        raise ValueError(
            f"{in_units(memory)} do not hold this model with {LEAST} rows: weights take "
            f"{in_units(found.weight_bytes)}, a forward pass is given {FORWARD_SHARE:.0%}, and {LEAST} rows take "
            f"{in_units(LEAST * found.token_bytes)}; give more memory, or take the model in a smaller precision"
        )
    return replace(found, budget=budget)


def model_in_outline(folder: Path) -> nn.Module:
    """The model of a folder without its weights being read; a config.json alone is enough.

    Without weights, they count in the precision that the configuration names.
    """
    has_weights = any(folder.glob("model*.safetensors"))
    model, _ = load_model(folder, lazy=True, strict=has_weights)
    if not has_weights:
        config = load_config(folder)
        named = config.get("torch_dtype") or config.get("dtype") or "float16"
        model.set_dtype(getattr(mx, named, mx.float16))
    return model

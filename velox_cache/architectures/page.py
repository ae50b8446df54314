"""The page of all architectures, written by `velox inspect-model --all`."""

import re
from importlib.metadata import version

from velox_cache.architectures.tiny import architectures, tiny_model
from velox_cache.architectures.verdict import Verdict, verdict
from velox_cache.introspection.plan import FULL_ATTENTION
from velox_fn.registry import METHODS

_INTRODUCTION = """# Architectures

Written by `velox inspect-model --all > docs/architectures.md`, with mlx-lm {version}: every module of `mlx_lm.models`
that has a model, a small random one of each, and what `install` answers. tests/architectures/ holds the bounded ones to
the plain cache: logits within the budget, rows and positions past it, batches, files, scores and bytes.

**{total} architectures: {bounded} bounded, {refused} refused** (notes {notes}). Other models of an architecture may mix
kinds of layers otherwise than its small one here; `velox inspect-model MODEL` says the same of one model.

- *bounded*: how many of the small model's caches are bounded. Every method that scores rows without queries works
  there, but for what a note says; methods that score by attention do with `queries="proxy"`.
- *true queries*: whether methods that score by attention see the model's own queries: those of the layer that writes
  the rows, not of layers that read another's. They are {by_attention}.
- *renumber*: whether `renumber=True` can turn cached keys, that is, whether the rotary embedding can be read.
- *alone*: with a budget for each layer (`install(model, budget=[...])`) its caches serve one sequence at a time, since
  its layers take no masks of their own, mlx_lm has no batches of it, or it does not run where this page was written.
  Those of every other serve batches.

- *losses*: whether `velox calibrate --losses` can measure what budgets cost each head, which `shares="calibrated"` and
  `"calibrated-layers"` take ([budgets.md](budgets.md#what-a-calibration-measures)).

| architecture | bounded | true queries | renumber | losses | alone | left alone or refused |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page, in Markdown."""
    found = {name: verdict(tiny_model(name)) for name in architectures()}
    notes = _Notes()
    refused = [name for name, each in found.items() if not each.bounded]
    numbers = sorted({notes.number(entry.reason) for name in refused for entry in found[name].layers})
    rows = [_row(name, each, notes) for name, each in found.items()]
    head = _INTRODUCTION.format(
        version=version("mlx-lm"),
        total=len(found),
        bounded=len(found) - len(refused),
        refused=len(refused),
        by_attention=", ".join(name for name, method in METHODS.items() if method().needs_queries),
        notes=", ".join(map(str, numbers)),
    )
    return head + "\n".join(rows) + "\n\n" + str(notes)


class _Notes:
    """Reasons, numbered in the order in which they come up."""

    def __init__(self) -> None:
        self._reasons: dict[str, int] = {}

    def number(self, reason: str) -> int:
        return self._reasons.setdefault(reason, len(self._reasons) + 1)

    def __str__(self) -> str:
        return "".join(f"{number}. {reason}\n" for reason, number in self._reasons.items())


def _row(name: str, each: Verdict, notes: _Notes) -> str:
    bounded = sum(entry.bounded for entry in each.layers)
    kinds = {entry.reason for entry in each.layers if entry.bounded} - {FULL_ATTENTION}
    of_kind = f" ({', '.join(str(notes.number(kind)) for kind in kinds)})" if kinds else ""
    others = sorted({notes.number(entry.reason) for entry in each.layers if not entry.bounded})
    cells = [name, f"{bounded} of {len(each.layers)}{of_kind}"]
    for reason in (each.no_queries, each.no_renumbering, each.no_losses):
        cells.append("yes" if reason is None else f"no ({notes.number(_general(name, reason))})" if bounded else "")
    no_budgets = None if each.no_budgets is None else f"refused ({notes.number(each.no_budgets)})"
    cells += [no_budgets or ("yes" if each.alone else ""), ", ".join(map(str, others))]
    return f"| {' | '.join(cells)} |"


def _general(name: str, reason: str) -> str:
    """A reason as it holds for any model: without the name and the layers of this one."""
    reason = reason.replace(f"model type {name!r}", "the model")
    return re.sub(r"layers \[[\d, ]+\]", "its layers", re.sub(r"^layer \d+", "a layer", reason))

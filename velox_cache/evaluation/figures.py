"""Figures of a comparison, as PNG. Colours are told apart by colour-blind readers, and markers repeat what they say."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from velox_cache.evaluation.ceilings import CEILINGS
from velox_cache.evaluation.compare import Row
from velox_cache.evaluation.report import answered, arms_of, divergences, shares_of, tasks_that_count
from velox_cache.evaluation.traces import N_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, black for the full cache and the ceilings.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#F0E442")
_MARKERS = "osD^vPX*<>p"
_LINE = 48  # characters of a title that fit above one panel


def save_figures(rows: Sequence[Row], full: str, folder: Path, title: str) -> list[Path]:
    """Draw what there is: KL and answers over shares, KL along traces. The files that were written.

    Raises ImportError that says what to install without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'velox-kv[plots]'") from error
    matplotlib.use("Agg")
    paths = []
    for name, figure in {"contexts": _contexts(rows, full), "traces": _traces(rows, full)}.items():
        if figure is not None:
            wide = int(_LINE * figure.get_figwidth() / 4.5)
            figure.suptitle("\n".join(textwrap.wrap(title, wide)), x=0.01, horizontalalignment="left")
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=110, metadata={"Software": None})  # the same rows give the same file
            paths.append(path)
    return paths


def _contexts(rows: Sequence[Row], full: str) -> "Figure | None":
    if not any(row.measure == "context" for row in rows):
        return None
    texts = [row for row in rows if row.measure == "context"]
    kl, shares, arms = divergences(texts), shares_of(texts), arms_of(texts, full)
    counting = [task for task, counts in tasks_that_count(texts, full).items() if counts]
    figure, axes = _panels(2 if counting else 1, arms)
    for i, arm in enumerate(arms):
        axes[0].plot(shares, [np.mean(kl[arm, share]) for share in shares], label=arm, **_style(arm, i))
    axes[0].set(title="KL to the full cache after the context", xlabel="share of rows", ylabel="nats", yscale="log")
    if counting:
        hits = answered(texts, counting)
        whole = float(np.sum(hits[full, ""]))
        for i, arm in enumerate(arms):
            axes[1].plot(shares, [np.sum(hits[arm, share]) / whole for share in shares], label=arm, **_style(arm, i))
        axes[1].set(title="answers, of the full cache's", xlabel="share of rows", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


def _traces(rows: Sequence[Row], full: str) -> "Figure | None":
    found = [row for row in rows if row.measure == "trace"]
    if not found:
        return None
    shares, arms = shares_of(found), arms_of(found, full)
    figure, axes = _panels(len(shares), arms)
    for share, ax in zip(shares, axes, strict=True):
        for i, arm in enumerate(arms):
            own = [row.values["kl_divergence"] for row in found if (row.arm, row.share) == (arm, share)]
            ax.plot(np.arange(1, N_PARTS + 1), np.mean(own, axis=0), label=arm, **_style(arm, i))
        ax.set(
            title=f"KL along traces, {share} of the rows", xlabel="stretch of the trace", ylabel="nats", yscale="log"
        )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


def _panels(n: int, labels: Sequence[str]) -> "tuple[Figure, list[Axes]]":
    """n panels, with room beside them for a legend of `labels`."""
    from matplotlib.figure import Figure

    columns = min(n, 4)
    lines = -(-n // columns)
    beside = max([1.6, *(0.6 + 0.06 * len(label) for label in labels)])
    figure = Figure(figsize=(4.5 * columns + beside, 3.8 * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for unused in axes[n:]:
        unused.set_axis_off()
    return figure, list(axes[:n])


def _style(arm: str, i: int) -> dict[str, Any]:
    if arm in CEILINGS:
        return {"color": "black", "linestyle": ":" if arm == "oracle" else "-."}
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "markersize": 4,
        "linestyle": "-" if i < len(COLOURS) else "--",
    }

"""Figures of a comparison, as PNG. Colours are told apart by colour-blind readers, and markers repeat what they say."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from velox_cache.evaluation.compare import Row
from velox_cache.evaluation.report import mean_perplexity, spread, task_verdicts, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, black for the full cache.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#F0E442")
_MARKERS = "osD^vPX*<>p"


def save_figures(rows: Sequence[Row], full: str, folder: Path, title: str) -> list[Path]:
    """Draw what there is: perplexity, tasks, head correlations, kept positions. The files that were written.

    Raises ImportError that says what to install without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'velox-kv[plots]'") from error
    matplotlib.use("Agg")
    drawn = {
        "perplexity": _perplexity(rows, full),
        "tasks": _tasks(rows, full),
        "attention": _attention(rows),
        "kept": _kept(rows),
    }
    paths = []
    for name, figure in drawn.items():
        if figure is not None:
            figure.suptitle(title, x=0.01, horizontalalignment="left")
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=110, metadata={"Software": None})  # the same rows give the same file
            paths.append(path)
    return paths


def _panels(n: int, width: float = 4.2, height: float = 3.6, labels: Sequence[str] = ()) -> "tuple[Figure, list[Axes]]":
    """n panels, with room beside them for a legend of `labels` or a colour bar."""
    from matplotlib.figure import Figure

    columns = min(n, 4)
    lines = -(-n // columns)
    beside = max([1.6, *(0.6 + 0.06 * len(label) for label in labels)])
    figure = Figure(figsize=(width * columns + beside, height * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for unused in axes[n:]:
        unused.set_axis_off()
    return figure, list(axes[:n])


def _logarithmic(ax: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1, 1.5, 2, 3, 5, 7)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _arms(rows: Sequence[Row], measure: str, full: str) -> list[str]:
    return list(dict.fromkeys(row.arm for row in rows if row.measure == measure and row.arm != full))


def _style(i: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[i % len(_COLOURS)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "linestyle": "-" if i < len(_COLOURS) else "--",
    }


def _perplexity(rows: Sequence[Row], full: str) -> "Figure | None":
    found, compression = mean_perplexity(rows), values_of(rows, "perplexity", "compression")
    subjects = list(dict.fromkeys(subject for subject, _, _ in found))
    if not subjects:
        return None
    figure, axes = _panels(len(subjects), labels=_arms(rows, "perplexity", full))
    for subject, ax in zip(subjects, axes, strict=True):
        ax.axhline(found[subject, full, None], color="black", label=full)
        for i, arm in enumerate(_arms(rows, "perplexity", full)):
            keys = sorted((key for key in found if key[:2] == (subject, arm)), key=lambda key: key[2] or 0)
            ax.plot([np.mean(compression[key]) for key in keys], [found[key] for key in keys], label=arm, **_style(i))
        ax.set(title=subject, xlabel="compression (full bytes / kept bytes)", ylabel="perplexity")
        _logarithmic(ax)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


def _tasks(rows: Sequence[Row], full: str) -> "Figure | None":
    found, compression = values_of(rows, "task", "score"), values_of(rows, "task", "compression")
    verdicts = task_verdicts(rows, full)
    if not verdicts:
        return None
    figure, axes = _panels(len(verdicts), labels=_arms(rows, "task", full))
    for (subject, good), ax in zip(verdicts.items(), axes, strict=True):
        ax.axhline(spread(found[subject, full, None]).mean, color="black", label=full)
        for i, arm in enumerate(_arms(rows, "task", full)):
            keys = sorted((key for key in found if key[:2] == (subject, arm)), key=lambda key: key[2] or 0)
            means = [spread(found[key]).mean for key in keys]
            errors = [spread(found[key]).deviation / spread(found[key]).n ** 0.5 for key in keys]
            x = [np.mean(compression[key]) for key in keys]
            ax.errorbar(x, means, errors, label=arm, capsize=2, **_style(i))
        ax.set(title=subject + ("" if good else "\nnot discriminative"), ylim=(-0.05, 1.05))
        ax.set(xlabel="compression (full bytes / kept bytes)", ylabel="score, mean and standard error")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


def _attention(rows: Sequence[Row]) -> "Figure | None":
    found = next((row.values for row in rows if row.measure == "attention"), None)
    if found is None:
        return None
    figure, axes = _panels(len(found), 3.0, 4.2)
    for (scorer, values), ax in zip(found.items(), axes, strict=True):
        image = ax.imshow(values["per_head"], vmin=-1, vmax=1, cmap="PuOr", aspect="auto", interpolation="nearest")
        ax.set(title=f"{scorer}\nmean {values['mean']:+.2f}", xlabel="KV head", ylabel="layer")
    figure.colorbar(image, ax=axes, label="Spearman with true mean attention")
    return figure


def _kept(rows: Sequence[Row]) -> "Figure | None":
    found = [row for row in rows if row.measure == "kept"]
    if not found:
        return None
    figure, axes = _panels(len(found), 4.2, 3.2)
    for row, ax in zip(found, axes, strict=True):
        image = ax.imshow(
            row.values["kept_share"], vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest"
        )
        ax.set(title=f"{row.arm}, {row.budget} rows", xlabel="token position", ylabel="bounded layer")
    figure.colorbar(image, ax=axes, label="share of heads that keep the row")
    return figure
